"""The Triton backend in dispatch: support, refusals and conformance."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch

import precondattn as pa
from precondattn.algebra.group import Group, group_of
from precondattn.backend import Request, UnsupportedError
from precondattn.kernel_backend.precise import VARIABLE
from precondattn_conformance.runner import Report, run_case
from precondattn_conformance.status import FAILED, PASSED
from precondattn_triton import Triton, backend
from precondattn_triton.precision import as_the_user_allows, product_precision
from precondattn_triton.target import compiling_for
from tests.backends.mechanism_groups import fewer_queries, groups, only, slow_unless
from tests.backends.triton.tiles import error, small_tiles

TAKEN = (
    "lucid_solve",
    "lucid_solve[beta=true]",
    "lucid",
    "lucid[beta=true]",
    "lucid_solve[metric=transported]",
    "lucid(path)",
    "unit_rows",
    "unit_rows[detach=false]",
    "row_normalized",
    "laser",
    "laser(softmax[causal=false])",
    "laser(softmax[window=3])",
    "laser(softmax[bias=true])",
    "lucid(laser)",
    "path",
    "path[window=3]",
    "softmax[window=3]",
    "softmax[causal=false,window=3]",
    "softmax[bias=true]",
    "softmax[softcap=2]",
    "softmax[sink=true]",
    "softmax[distance=slopes]",
    "gated_delta",
)
OF_ANY_WIDTH = tuple(name for name in TAKEN if not name.startswith("laser"))
"""LASER's kernels decline the widths of the suite's cases in half precision."""
WITH_GRADIENT_IN_FLOAT16 = tuple(name for name in OF_ANY_WIDTH if name != "row_normalized")
"""The norm's gradient at rows of zeros is beyond float16's range, and declined."""
OF_LONG_KERNELS = ("path", "path[window=3]", "gated_delta")
"""Mechanisms that are slow in half precision, which the tests of their kernels cover."""
RECURRENCES = ("gated_delta", "ssd", "gla", "gsa", "kda", "conditioned_query", "ccq(gated_delta)")
DTYPES = ("float32", "bfloat16", "float16")
INTERPRET = "TRITON_INTERPRET"


@pytest.mark.thorough(but=("torch-lucid[beta=true]2", "torch-row_normalized0"))
@pytest.mark.parametrize(
    "group",
    [
        *only(TAKEN.__contains__, groups("smoke", "torch", ("float32",))),
        *slow_unless(
            lambda mechanism: mechanism not in OF_LONG_KERNELS,
            only(OF_ANY_WIDTH.__contains__, groups("smoke", "torch", DTYPES[1:])),
        ),
        *fewer_queries("torch", "float16", (*WITH_GRADIENT_IN_FLOAT16, *RECURRENCES)),
    ],
)
def test_all_supported_mechanisms_conform(group):
    # The interpreter runs one kernel at a time.
    cases = [case for case in group.cases if case.check != "threads"]
    with small_tiles():
        report = Report([run_case(case, ("triton", "torch")) for case in cases])
    failed = [f"{o.case.id}: {o.reason}" for o in report.outcomes if o.status == FAILED]
    assert not failed, "\n".join(failed)
    assert any(o.status == PASSED for o in report.outcomes)


def arrays(t=20, h=2, n=2, d=8, e=8, dtype=torch.float32):
    return (torch.randn(2, t, heads, width).to(dtype) for heads, width in ((h, d), (n, d), (n, e)))


def test_in_the_interpreter_the_backend_runs_only_if_it_is_named():
    q, k, v = arrays()
    assert "triton" not in pa.Lucid().explain(q, k, v).backends
    named = pa.Lucid().explain(q, k, v, backend=("triton", "torch"))
    assert named.backends == ("triton", "torch")


def request(mechanism, device="cpu", dtype="float32", verb="vjp", masks=(), **shapes):
    return Request(verb, "torch", device, dtype, tuple(shapes.items()), frozenset(masks))


KV = {"k": (2, 20, 2, 8), "v": (2, 20, 2, 8)}


@pytest.mark.parametrize(
    ("mechanism", "changes", "reason"),
    [
        ("lucid_solve[window=3]", {}, "no window"),
        ("lucid_solve[normalize=rows]", {}, "unit diagonal"),
        ("lucid_solve", {"dtype": "float64"}, "float64"),
        ("lucid_solve", {"device": "cuda"}, "interprets"),
        ("lucid_solve", {"k": (2, 20, 2, 264)}, "d=264"),
        ("lucid_solve", {"v": (2, 20, 2, 520)}, "e=520"),
        ("lucid_solve", {"v": (0, 20, 2, 8)}, "empty"),
        ("lucid_solve", {"k": (2, 5, 2, 8), "verb": "extend"}, "16 or more"),
        ("lucid_solve", {"verb": "extend", "masks": ("segment_ids",)}, "packed"),
        ("softmax", {"q": (2, 20, 2, 8)}, "without options"),
        (
            "gla",
            {"q": (2, 20, 2, 8), "k": (2, 20, 2, 264), "g": (2, 20, 2, 264)},
            "d <= 256 and e <= 512; found d=264",
        ),
        (
            "gla",
            {"k": (2, 20, 2, 520), "g": (2, 20, 2, 520), "dtype": "bfloat16"},
            "d <= 512",
        ),
        (
            "path",
            {"q": (2, 20, 2, 192), "k": (2, 20, 2, 192), "verb": "extend"},
            "several tokens supports d <= 128; found d=192",
        ),
        ("unit_rows[axis=channel]", {"o": (2, 20, 2, 8)}, "channels"),
        ("unit_rows", {"o": (2, 20, 2, 520)}, "520"),
        ("unit_rows", {"o": (2, 20, 2, 8), "dtype": "float16", "verb": "vjp"}, "eps"),
    ],
)
def test_unsupported_calls_are_declined_with_the_reason(mechanism, changes, reason):
    refusal = Triton().refusal(
        pa.parse(mechanism).program.leaves[0], request(mechanism, **{**KV, **changes})
    )
    assert reason in refusal


def test_an_older_triton_is_declined_with_its_version(monkeypatch):
    solve = pa.LucidSolve()
    assert Triton().refusal(solve, request(solve, **KV)) is None
    monkeypatch.setattr(backend, "_version", lambda: (3, 5))
    assert Triton().refusal(solve, request(solve, **KV)) == "needs Triton 3.6 or newer; found 3.5"


def test_on_amd_calls_that_fit_are_supported():
    solve = pa.LucidSolve()
    with compiling_for("gfx942"):
        assert Triton().refusal(solve, request(solve, **KV)) is None
        wide = request(solve, **{**KV, "v": (2, 20, 2, 128)})
        assert "found 128" in Triton().refusal(solve, wide)


@pytest.mark.parametrize(
    ("dtype", "h", "d", "fits"),
    [
        ("bfloat16", 63, 128, True),
        ("bfloat16", 64, 128, False),
        ("bfloat16", 31, 256, True),
        ("bfloat16", 32, 256, False),
        ("bfloat16", 1, 264, False),
        ("float32", 31, 256, True),
        ("float32", 32, 8, False),
    ],
)
def test_a_step_supports_as_many_query_heads_as_fit(dtype, h, d, fits):
    group = Group(group_of("lucid"))
    shapes = {"q": (2, 1, h, d), "k": (2, 1, 1, d), "v": (2, 1, 1, d)}
    refusal = Triton().refusal(group, request(group, dtype=dtype, verb="extend", **shapes))
    assert (refusal is None) == fits
    assert fits or f"d={d}" in refusal


@pytest.mark.parametrize(
    ("dtype", "t", "h", "d", "fits"),
    [
        ("bfloat16", 15, 3, 128, True),
        ("bfloat16", 15, 4, 128, False),
        ("bfloat16", 8, 3, 256, True),
        ("float32", 15, 1, 128, True),
        ("float32", 15, 1, 256, False),
        ("float32", 16, 4, 256, True),
    ],
)
def test_a_step_by_a_few_tokens_supports_as_many_rows_as_fit(dtype, t, h, d, fits):
    group = Group(group_of("lucid"))
    shapes = {"q": (2, t, h, d), "k": (2, t, 1, d), "v": (2, t, 1, d)}
    refusal = Triton().refusal(group, request(group, dtype=dtype, verb="extend", **shapes))
    assert (refusal is None) == fits
    assert fits or "fit a tile" in refusal


def test_a_traced_step_runs_on_another_backend():
    m = pa.Lucid()
    q, k, v = arrays(1)
    cache = m.init_cache(q, k, v, capacity=8)

    def step(q, k, v):
        return m.extend(cache, q, k, v, backend=("triton", "torch"))[0]

    with small_tiles():
        result = torch.compile(step, backend="eager", fullgraph=True)(q, k, v)
        torch.testing.assert_close(result, step(q, k, v), rtol=1e-5, atol=1e-6)


def test_tf32_is_the_users_choice_in_float32_and_in_precise_kernels_in_float16(monkeypatch):
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        for precision, expected in (("ieee", "tf32x3"), ("tf32", "tf32")):
            matmul.fp32_precision = precision
            assert as_the_user_allows() == expected
            for precise, in_float16 in (("0", "tf32"), ("1", expected)):
                monkeypatch.setenv(VARIABLE, precise)
                assert product_precision(torch.float16) == in_float16
                assert product_precision(torch.bfloat16) == "tf32"
    finally:
        matmul.fp32_precision = before


def test_an_unsupported_call_is_an_error_if_no_other_backend_is_allowed():
    q, k, v = arrays()
    with pytest.raises(UnsupportedError, match="no kernels for softmax"):
        pa.Lucid()(q, k, v, backend="triton")


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("beta", [False, True])
@pytest.mark.parametrize(("h", "n", "d", "e"), [(4, 2, 12, 20), (16, 1, 8, 8), (2, 2, 40, 16)])
def test_decoding_after_a_cache(dtype, bound, beta, h, n, d, e):
    torch.manual_seed(0)
    m, t, first = pa.Lucid(beta=beta), 37, 33
    q, k, v = arrays(t, h, n, d, e, dtype)
    k = 0.3 * k + k[:, :1]
    x = {"q": q, "k": k, "v": v}
    if beta:
        x["lucid_beta"] = 2 * torch.rand(2, t, n).to(dtype)
    expected = m(**{name: a.double() for name, a in x.items()}, backend="reference")
    cache = m.init_cache(**x, capacity=40)
    _, cache = m.extend(cache, **{name: a[:, :first] for name, a in x.items()})
    for i in range(first, t):
        with small_tiles(i):
            new = {name: a[:, i : i + 1] for name, a in x.items()}
            out, cache = m.extend(cache, **new, backend="triton")
        assert error(out[:, 0], expected[:, i]) < bound


def test_decoding_sequences_of_unequal_lengths():
    """One sequence begins with the step, and one has no new token."""
    torch.manual_seed(0)
    m = pa.Lucid()
    q, k, v = (torch.randn(3, 21, 2, 8) for _ in range(3))
    cache = m.init_cache(q, k, v, capacity=24)
    past = {"q": q[:, :20], "k": k[:, :20], "v": v[:, :20]}
    _, cache = m.extend(cache, **past, lengths=torch.tensor([20, 0, 7]))
    new = {"q": q[:, 20:], "k": k[:, 20:], "v": v[:, 20:]}
    lengths = torch.tensor([1, 1, 0])
    expected, other = m.extend(cache, **new, lengths=lengths, backend="torch")
    with small_tiles():
        result, cache = m.extend(cache, **new, lengths=lengths, backend="triton")
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
    for name, buffer in other.store.items():
        torch.testing.assert_close(cache.store[name], buffer, rtol=1e-5, atol=1e-6)


def test_the_ledger_is_generated_from_the_saved_reports():
    """The ledger equals the output of `docs/make_ledger.py`."""
    docs = Path(__file__).parents[3] / "docs"
    maker = runpy.run_path(str(docs / "make_ledger.py"))
    made = maker["page"](maker["reports"](), maker["reports"]("other_versions"))
    assert (docs / "kernel_ledger.md").read_text(encoding="utf-8") == made


@pytest.mark.thorough
def test_a_named_interpreted_backend_has_the_arithmetic_of_a_gpu():
    """The arithmetic is a GPU's also in a process that does not import the checks of kernels."""
    code = """
import torch, precondattn as pa
torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 20, 2, 8).bfloat16()
out = pa.Lucid()(q, k, v, backend=("triton", "torch"))
expected = pa.Lucid()(q.double(), k.double(), v.double())
assert (out - expected).abs().max() < 3e-2
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, INTERPRET: "1"})


@pytest.mark.thorough
def test_every_configuration_is_compiled_ahead_of_time():
    code = """
from unittest.mock import patch
from precondattn_triton import configurations, tiles, unit_rows, variants
from precondattn_triton.recurrence import chunk_arrays
from precondattn_triton.lucid import plan as lucid_plan
from precondattn_triton.lucid import step as lucid_step
from precondattn_triton.path import blocks, chunk_gradient
from precondattn_triton.path import step as path_step
from precondattn_triton.softmax import laser_decode, laser_exact, softmax_forward
compiled, look_up = set(), configurations.configuration
def noted(kernel, *rest):
    cut = look_up(kernel, *rest)
    compiled.add((kernel, cut))
    return cut
for module in (
    *(chunk_arrays, lucid_plan, lucid_step, path_step, softmax_forward),
    *(laser_decode, laser_exact, tiles, unit_rows, blocks, chunk_gradient),
):
    patch.object(module, "configuration", noted).start()
for target in ("sm_80", "sm_90"):
    compiled.clear()
    names = [variant.name for variant in variants.variants(target)]
    assert len(names) == len(set(names))
    chosen = configurations.REGISTRY.chosen.get(target, {})
    by_key = {**configurations.REGISTRY.untuned, **chosen}
    shipped = {(key.kernel, cut) for key, cut in by_key.items()}
    assert len(shipped) <= 200 + len(set(chosen.values())), len(shipped)
    assert compiled == shipped, shipped ^ compiled
"""
    without = {name: value for name, value in os.environ.items() if name != INTERPRET}
    subprocess.run([sys.executable, "-c", code], check=True, env=without)
