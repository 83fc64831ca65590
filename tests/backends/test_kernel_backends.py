"""What all backends with kernels share: refusals, masked keys, and options of attention."""

import json
import sys
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

import precondattn as pa
from precondattn.algebra.group import Group, group_of
from precondattn.dispatch.discovery import discover
from precondattn.kernel_backend.configurations import Configurations
from precondattn.kernel_backend.kernel_table import ByOption, kernels_in
from precondattn.spec.laser import LOG_MEAN_EXP
from precondattn_conformance.cases import cases
from precondattn_conformance.runner import run_case
from precondattn_conformance.status import PASSED
from precondattn_cupy.backend import KERNELS as OF_CUPY
from precondattn_pallas.backend import KERNELS as OF_PALLAS
from precondattn_triton.backend import KERNELS as OF_TRITON
from tests.backends.kernel_problems import leaf_of, request_of
from tests.kernel_tools.toolchain import needs_simulator

OPTIONS = {
    "softcap=2": "a soft cap",
    "sink=true": "a sink",
    "distance=slopes": "slopes of distances",
    "distance=buckets": "buckets of distances",
    "read=mean_and_log_sum": "no kernels for softmax",
}
"""Options of attention that these backends have no kernel for, and words of the reason."""

STEP, T0 = {"verb": "extend"}, (2, 0, 4, 8)
REFUSED = (
    *(
        (backend, leaf, changes, reason)
        for backend in ("cupy", "pallas", "tpu")
        for leaf, changes, reason in (
            ("lucid_solve", {}, None),
            ("lucid_solve[window=3]", {}, "no window"),
            ("lucid_solve[normalize=rows]", {}, "unit diagonal"),
            ("lucid_solve[metric=transported]", {}, "dot product"),
            ("lucid_solve", {"dtype": "float64"}, "float64"),
            ("lucid_solve", {"d": 264}, "d=264"),
            ("lucid_solve", {"e": 520}, "e=520"),
            ("lucid_solve", {"v": (0, 20, 2, 8)}, "empty"),
            ("lucid_solve", STEP, "no step"),
            ("gated_delta", {"e": 520}, "e=520"),
            ("conditioned_query", {"d": 300}, "d=300"),
            ("path", {}, "no kernels"),
        )
    ),
    *(
        (backend, leaf, changes, reason)
        for backend in ("cupy", "pallas")
        for leaf, changes, reason in (
            ("softmax", {}, None),
            ("softmax[window=4,scale=2]", {}, None),
            ("laser(softmax[causal=false])", {}, None),
            ("softmax[bias=true]", {}, "a bias"),
            ("softmax[forget=scaled]", {}, "a forget gate"),
            *((f"softmax[window=4,{option}]", {}, reason) for option, reason in OPTIONS.items()),
            ("softmax", {"q": T0}, "empty"),
            ("kda", {"d": 264}, "d=264"),
        )
    ),
    *(
        ("cupy", leaf, changes, reason)
        for leaf, changes, reason in (
            ("lucid_solve", {"b": 256, "n": 256}, "65535 heads"),
            ("softmax", {"d": 256, "e": 512}, None),
            ("softmax", {"d": 257}, "keys of at most 256 channels; found 257"),
            ("softmax", {"e": 513}, "values of at most 512 channels; found 513"),
            ("softmax", {"h": 65536}, "at most 65535 sequences"),
            ("softmax", {"t": 2**30}, "fewer than"),
            ("laser", {"e": 129, "dtype": "float16"}, "at most 128 channels; found 129"),
            ("softmax", STEP, None),
            ("softmax", {**STEP, "d": 256, "e": 128}, None),
            ("softmax", {**STEP, "q": (2, 2, 4, 8)}, "one token; found t=2"),
            ("softmax[window=3]", STEP, "no window"),
            ("softmax[bias=true]", STEP, "a bias"),
            ("softmax", {**STEP, "e": 129}, "values of at most 128 channels; found 129"),
            ("gsa", {}, "no kernels"),
            ("linear", {"b": 40000}, "65535 heads"),
            ("unit_rows[axis=channel]", {}, "not of channels"),
            ("unit_rows", {"dtype": "float16"}, "if eps is at least"),
            ("lucid", STEP, None),
            ("lucid", {**STEP, "h": 63, "n": 1, "d": 256, "e": 256}, None),
            ("lucid", {**STEP, "h": 64, "n": 1}, "and 64"),
            ("lucid", {**STEP, "q": (2, 2, 4, 8)}, "t=2"),
            ("lucid(softmax[window=3])", STEP, "plain LUCID"),
        )
    ),
    ("pallas", "lucid_solve", {"device": "cuda"}, "interprets"),
    ("pallas", "softmax", STEP, "no step"),
    ("pallas", "softmax", {"e": 136}, "found 136"),
    ("pallas", "gla", {"d": 264}, "d=264"),
    ("pallas", "gsa", {"s": (2, 20, 2, 300)}, "found m=300"),
    *(
        ("tpu", leaf, changes, reason)
        for leaf, changes, reason in (
            ("linear", {"h": 64, "d": 256, "e": 512}, "32 queries to a state"),
            ("linear[normalize=true]", {"h": 12, "d": 256, "e": 512}, "e=640"),
            ("softmax", {}, "has no kernels for softmax on a TPU"),
            ("laser", {}, "no kernels"),
            ("lucid", STEP, "no kernels"),
            ("linear", {"dtype": "float16"}, "supports float32, bfloat16; found float16"),
            *(
                (leaf, {}, f" is not computed {with_what}")
                for leaf, with_what in (
                    ("gla", "with gate='channel'"),
                    ("kda", "with gate='channel'"),
                    ("comba", "with erase='own key, before the decay'"),
                    ("delta_product", "with steps=2"),
                )
            ),
            ("gsa", {}, "rule='slots' is not computed"),
        )
    ),
)


@pytest.fixture
def backend(request, monkeypatch):
    """A backend, by its name in the parameters; Pallas on a GPU or on a TPU."""
    if request.param in ("pallas", "tpu"):
        module = pytest.importorskip("precondattn_pallas.backend")
        interpreted = module.TPU if request.param == "tpu" else module.CUDA
        monkeypatch.setattr(module, "_interpreted", lambda: interpreted)
    return discover().named("pallas" if request.param == "tpu" else request.param)


@pytest.mark.parametrize(
    ("backend", "call", "reason"),
    [(backend, (text, changes), reason) for backend, text, changes, reason in REFUSED],
    indirect=["backend"],
    ids=str,
)
def test_calls_without_kernels_are_declined_with_the_reason(backend, call, reason):
    text, changes = call
    piece = Group(group_of(text)) if text.startswith("lucid") and "_" not in text else leaf_of(text)
    library = {"pallas": "jax", "cupy": "numpy"}[backend.name]
    refusal = backend.refusal(piece, request_of(piece, library=library, **changes))
    assert refusal is None if reason is None else reason in refusal


@pytest.mark.parametrize("backend", ["cupy", "pallas"], indirect=True)
def test_on_a_cpu_kernels_run_only_if_they_are_named(backend):
    x = np.ones((3, 2, 20, 2, 8), np.float32)
    x = x if backend.name == "cupy" else pytest.importorskip("jax").numpy.asarray(x)
    assert backend.name not in pa.Lucid().explain(*x).backends
    assert pa.Lucid().explain(*x, backend=backend.name).backends == (backend.name,) * 2
    with pytest.raises(pa.UnsupportedError, match="no kernels for path"):
        pa.Path()(*x, w=x[1] / 3, beta=x[1][..., 0], backend=backend.name)


BY_TRITON = ("triton", "torch")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.thorough(but=("splits-triton-lucid", "splits-triton-path[flush=3]"))
@pytest.mark.parametrize(
    ("backends", "library", "mechanism"),
    [
        *(
            pytest.param(BY_TRITON, "torch", name, marks=needs_triton, id=f"triton-{name}")
            for name in ("lucid", "path[flush=3]")
        ),
        (("pallas", "jax"), "jax", "lucid"),
        *(
            pytest.param(("cupy", "portable"), "numpy", name, marks=needs_simulator)
            for name in ("lucid", "softmax", "laser")
        ),
    ],
)
@pytest.mark.parametrize("check", ["caching", "splits"])
def test_a_token_whose_key_is_masked_attends_to_the_cache(check, backends, library, mechanism):
    pytest.importorskip(library)
    chosen = {
        "only_libraries": (library,),
        "only_mechanisms": (mechanism,),
        "only_checks": (check,),
        "only_dtypes": ("float32",),
    }
    result = [case for case in cases("full", **chosen) if "-masked-" in case.id]
    assert result
    for case in result:
        outcome = run_case(case, backends)
        assert outcome.status == PASSED, outcome.reason


TABLES = {"cupy": OF_CUPY, "triton": OF_TRITON, **OF_PALLAS}
NEEDED = {"triton": ["torch", "triton"], **{device: ["jax"] for device in OF_PALLAS}}


def test_a_table_is_searched_by_the_exact_classes_and_by_an_option():
    table = {
        pa.Softmax: ByOption("read", {LOG_MEAN_EXP: "fractions:Fraction"}),
        pa.UnitRows: ByOption("eps", {}, otherwise="decimal:Decimal"),
        (pa.LucidSolve, pa.Softmax): "colorsys:rgb_to_hsv",
    }
    group = pa.parse("lucid")
    assert kernels_in(table, pa.Softmax()) is None
    assert kernels_in(table, replace(pa.Softmax(), read=LOG_MEAN_EXP)).__name__ == "Fraction"
    assert kernels_in(table, pa.UnitRows()).__name__ == "Decimal"
    assert kernels_in(table, pa.Path()) is None
    sys.modules.pop("colorsys", None)
    assert kernels_in(table, pa.LucidSolve()) is None
    assert "colorsys" not in sys.modules
    assert kernels_in(table, group).__name__ == "rgb_to_hsv"


@pytest.mark.parametrize("name", TABLES)
def test_every_entry_of_a_table_names_a_class(name):
    for framework in NEEDED.get(name, ()):
        pytest.importorskip(framework)
    for entry in TABLES[name].values():
        by_option = isinstance(entry, ByOption)
        for text in (*entry.classes.values(), entry.otherwise) if by_option else (entry,):
            assert not text or hasattr(kernels_in({pa.Softmax: text}, pa.Softmax()), "refuses")


def registry_of(path, text):
    path.write_text(text)
    return Configurations(path, lambda name: name, (16, 32, 64))


def test_forced_configurations_are_preferred_to_those_of_an_architecture(tmp_path):
    kernel = {"half": {"32": ["narrow"], "64": ["wide"]}, "full": {"32": ["full"]}}
    tables = {"every device": {"kernel": kernel}, "sm_90": {"kernel": {"half": {"64": ["chosen"]}}}}
    registry = registry_of(tmp_path / "configurations.json", json.dumps(tables))
    assert registry.find("kernel", 16, half=True) == "narrow"
    assert registry.find("kernel", 64, half=True) == "wide"
    with pytest.raises(KeyError):
        registry.find("kernel", 64, half=False)
    assert registry.find("kernel", 32, True, "sm_90") == "chosen"
    assert registry.find("kernel", 32, False, "sm_90") == "full"
    assert registry.find("kernel", 32, True, "sm_80") == "narrow"
    with registry.forced(kernel="forced"):
        assert registry.find("kernel", 64, False) == "forced"
    assert registry.find("kernel", 64, True) == "wide"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"sm_90": {"read": {"hlf": {"32": [1]}}}}', "read has 'hlf' and the widths"),
        ('{"sm_90": {"read": {"half": {"48": [1]}}}}', r"read has 'half' and the widths \[48\]"),
        ('{"sm_90": {"read": {}, "read": {}}}', r"a name occurs twice among \['read', 'read'\]"),
        ('{"sm_90": {"read": {"full": {"16": [1, 2]}}}}', "takes 1 positional argument but 2"),
    ],
)
def test_a_wrong_file_of_configurations_is_refused(tmp_path, text, message):
    with pytest.raises((TypeError, ValueError), match=message):
        registry_of(tmp_path / "configurations.json", text)
