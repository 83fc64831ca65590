"""Kernels are chosen by default only where the backend's ledger says that they ran and agreed.

The page of what kernels compute is what the backends answer.
"""

import itertools
import json
import re
import runpy
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", minversion="3.6")
pytest.importorskip("triton")
pytest.importorskip("torch")
pytest.importorskip("jax")

import precondattn as pa
from precondattn.backend import Request
from precondattn.dispatch.described import explain_described
from precondattn.dispatch.discovery import allowed_backends, discover
from precondattn.dispatch.plan import _plan
from precondattn.kernel_backend import backend as kernel_backend
from precondattn.kernel_backend import code_hash, ledger
from precondattn.kernel_backend.code_hash import code_of
from precondattn.kernel_backend.kernel_table import recurrences_in
from precondattn.kernel_backend.ledger import LedgerEntry
from precondattn_cupy import backend as cupy_backend
from precondattn_cupy.launch import FOLDER
from precondattn_triton import backend as triton_backend
from precondattn_triton.backend import Triton

SHAPES = (("k", (1, 128, 4, 64)), ("v", (1, 128, 4, 64)))
ON_CUDA = Request("forward", "torch", "cuda", "bfloat16", SHAPES, frozenset())
SOLVE = pa.LucidSolve()


@pytest.fixture
def gpu(monkeypatch):
    """Triton as on a GPU of compute capability 9.0; returns a function that sets its ledger."""
    monkeypatch.delenv(ledger.TRUST, raising=False)
    # Not the environment: Triton reads it while a kernel is defined, which an import here may do.
    monkeypatch.setattr(triton_backend, "is_interpreting", lambda: False)
    monkeypatch.setattr(Triton, "capability", lambda self: "9.0")
    monkeypatch.setattr(Triton, "assembler", lambda self: "ptxas 13.1")

    def with_entries(*entries):
        monkeypatch.setattr(kernel_backend, "entries", lambda package: frozenset(entries))

    with_entries()
    return with_entries


def chosen(expression="lucid", dtype="bfloat16", backend=None, **sizes):
    explained = explain_described(
        pa.parse(expression), "torch", dtype, "cuda", "forward", sizes, backend=backend
    )
    return explained.backends


def test_kernels_without_an_entry_run_by_name_or_where_the_environment_trusts_them(
    gpu, monkeypatch
):
    assert chosen() == ("torch", "torch")
    assert chosen(backend=("triton", "torch")) == ("triton", "torch")
    with pa.use_backend("triton", "torch"):
        assert chosen(backend=allowed_backends(None)) == ("triton", "torch")
    for value, backend in (("1", "triton"), ("0", "torch")):
        monkeypatch.setenv(ledger.TRUST, value)
        assert chosen() == (backend, "torch")
    assert Triton().refuses_by_default(SOLVE, replace(ON_CUDA, device="cpu")) is None

    class ThirdParty(kernel_backend.KernelBackend):
        name = "third_party"
        accelerates = frozenset({"cuda"})

    assert ThirdParty().refuses_by_default(SOLVE, ON_CUDA) is None


def test_an_entry_turns_on_its_kernel_and_no_other(gpu):
    entry = Triton().ledger_entry(SOLVE, ON_CUDA)
    gpu(entry)
    assert chosen() == ("triton", "torch")
    assert chosen(d=33) == ("triton", "torch"), "padded to the same width"
    assert chosen(dtype="float16") == chosen(d=128) == ("torch", "torch")
    assert chosen("gated_delta") == ("torch",)
    for other in (
        *({"capability": "8.0"}, {"assembler": "ptxas 12.8"}, {"code": "0"}, {"verb": "vjp"}),
    ):
        gpu(entry._replace(**other))
        assert chosen() == ("torch", "torch"), other
    # Options that select kernels are families of their own.
    transported = Triton().ledger_entry(replace(SOLVE, metric="transported"), ON_CUDA).family
    assert transported == "lucid_solve[metric=transported]:LucidSolveKernels"
    assert entry.family == "lucid_solve:LucidSolveKernels"
    of_options = ledger.family_of(pa.Softmax(window=8, softcap=30.0, sink=True), "module:Class")
    assert of_options == "softmax[softcap=given,sink=True]:Class"


def test_a_step_that_may_be_differentiated_needs_the_gradient_of_a_step_too(gpu):
    step = replace(ON_CUDA, verb="extend", shapes=(("q", (1, 1, 4, 64)), *SHAPES))
    of_step = Triton().ledger_entry(pa.GatedDelta(), step)
    gpu(of_step)
    assert Triton().refuses_by_default(pa.GatedDelta(), step) is None
    differentiated = replace(step, differentiated=True)
    assert "have not yet run" in Triton().refuses_by_default(pa.GatedDelta(), differentiated)
    gpu(of_step, of_step._replace(verb="extend_vjp"))
    assert Triton().refuses_by_default(pa.GatedDelta(), differentiated) is None


def test_no_warning_says_that_an_untried_kernel_was_passed_over(gpu, monkeypatch):
    assert _plan.__wrapped__(SOLVE, ON_CUDA, None, None, discover())[1] is None
    # A kernel that declines is a reason to warn, as before.
    monkeypatch.setattr(Triton, "refuses_by_default", lambda *call: None)
    monkeypatch.setattr(Triton, "refuses_request", lambda *call: "is too old")
    assert "is too old" in _plan.__wrapped__(SOLVE, ON_CUDA, None, None, discover())[1]


def test_the_file_of_a_package_is_read(tmp_path, monkeypatch):
    package = tmp_path / "some_kernels"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert ledger.entries("some_kernels") == frozenset()
    entry = ledger.LedgerEntry("laser:LaserKernels", "vjp", "float16", 64, "9.0", "NVRTC", "abc")
    (package / ledger.FILE).write_text(json.dumps([entry._asdict()]))
    ledger.entries.cache_clear()
    assert ledger.entries("some_kernels") == {entry}


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the CUDA backend, and the hash of its softmax kernels as they are now."""
    import precondattn_cupy

    folder = tmp_path / "copied_kernels"
    shutil.copytree(Path(precondattn_cupy.__file__).parent, folder)
    for path in folder.rglob("*.py"):
        path.write_text(path.read_text().replace("precondattn_cupy", "copied_kernels"))
    monkeypatch.syspath_prepend(tmp_path)

    def hashed():
        code_of.cache_clear()
        return code_of("copied_kernels.softmax.leaf:SoftmaxKernels")

    return folder, hashed


def test_the_hash_of_a_kernel_changes_with_its_code_and_all_that_it_uses_and_with_no_more(copied):
    folder, hashed = copied

    def edited(file, old, new):
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new, 1))

    before = hashed()
    for file, old, new in (
        ("softmax/leaf.py", '"""', '"""Changed. '),
        ("layout.py", "from __future__", "# A comment.\nfrom __future__"),
        ("cuda/softmax_forward.cu", "__global__", "// A comment.\n__global__"),
        ("cuda/scan.cu", "__global__", "extern __global__"),
        ("lucid/solve.py", "return ", "return 1 + "),
    ):
        edited(file, old, new)
        assert hashed() == before, file
    for file, old, new in (
        ("softmax/leaf.py", "return ", "return 1 + "),
        ("layout.py", "return ", "return 1 + "),
        ("cuda/softmax_forward.cu", "__global__", "extern __global__"),
        ("cuda/running_softmax.cuh", "return", "return 1 +"),
        ("configurations.json", "[64, 32]", "[64, 16]"),
    ):
        before = hashed()
        edited(file, old, new)
        assert hashed() != before, file


@pytest.mark.thorough
def test_every_cuda_file_is_hashed_with_a_kernel_and_kernels_have_different_hashes():
    rows = (getattr(row, "classes", {"": row}).values() for row in cupy_backend.KERNELS.values())
    modules = {entry.partition(":")[0] for entry in itertools.chain(*rows)}
    hashed = {name for module in modules for name in code_hash._sources(module)}
    assert {path.name for path in FOLDER.iterdir()} <= hashed
    entries = {entry for entry in triton_backend.KERNELS.values() if isinstance(entry, str)}
    assert len({code_of(entry) for entry in entries}) == len(entries)


MAKER = SimpleNamespace(
    **runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make_kernels.py"))
)
TRITON = MAKER.COLUMNS[0]
CLASS = "precondattn_triton.recurrence.chunkwise:RecurrenceKernels"


@pytest.mark.thorough
def test_the_page_is_what_the_backends_answer_and_has_every_mechanism():
    text = MAKER.PAGE.read_text(encoding="utf-8")
    assert text == MAKER.page(), "run python docs/make_kernels.py"
    rows = re.findall(r"^\| `(.+?)` ", text, re.M)
    ours = [n for n, c in pa.mechanisms().items() if c.__module__.startswith("precondattn.")]
    assert not [name for name in ours if not any(re.search(rf"\b{name}\b", row) for row in rows)]


@pytest.mark.parametrize("column", MAKER.COLUMNS, ids=lambda column: column.title)
def test_no_recurrence_is_in_a_table_of_kernels_that_decline_it(column):
    with MAKER.asked(), MAKER.describing(column) as backend:
        leaves = recurrences_in(backend.table)
        assert leaves
        for leaf in leaves:
            assert MAKER.cell(leaf, column, "forward") == ((leaf,), ())


def test_a_cell_is_marked_where_the_code_of_today_has_run_on_its_device():
    run = LedgerEntry("gla:RecurrenceKernels", "vjp", "bfloat16", 64, "9.0", "x", code_of(CLASS))
    with MAKER.asked():
        answer = MAKER.cell(pa.parse("gla"), TRITON, "backward")
        of_lucid = MAKER.cell(pa.parse("lucid"), TRITON, "forward")
    assert "has no kernels for softmax" in "; ".join(of_lucid.reasons)
    assert MAKER.ran_on(answer, TRITON, "backward", [run]) == ["9.0"]
    assert MAKER.ran_on(answer, TRITON, "backward", [run._replace(code="earlier")]) == []
    assert MAKER.ran_on(answer, TRITON, "forward", [run]) == []
