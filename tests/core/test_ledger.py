"""Kernels are chosen by default only where the backend's ledger says that they ran and agreed."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import precondattn as pa
from precondattn.backend import Request
from precondattn.dispatch.described import explain_described
from precondattn.dispatch.discovery import allowed_backends, discover
from precondattn.dispatch.plan import _plan
from precondattn.kernel_backend import backend as kernel_backend
from precondattn.kernel_backend import code_hash, ledger
from precondattn.kernel_backend.code_hash import code_of
from precondattn_cupy import backend as cupy_backend
from precondattn_cupy.sources import FOLDER
from precondattn_triton import backend as triton_backend
from precondattn_triton.backend import Triton

pytest.importorskip("triton", minversion="3.6")

SHAPES = (("k", (1, 128, 4, 64)), ("v", (1, 128, 4, 64)))
ON_CUDA = Request("forward", "torch", "cuda", "bfloat16", SHAPES, frozenset())
SOLVE = pa.LucidSolve()


@pytest.fixture
def gpu(monkeypatch):
    """Triton as on a GPU of compute capability 9.0; returns a function that sets its ledger."""
    monkeypatch.delenv(ledger.TRUST, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
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


def entry_of_solve():
    return Triton().ledger_entry(SOLVE, ON_CUDA)


def test_kernels_without_an_entry_run_by_name_only(gpu):
    assert chosen() == ("torch", "torch")
    assert chosen(backend=("triton", "torch")) == ("triton", "torch")
    with pa.use_backend("triton", "torch"):
        assert chosen(backend=allowed_backends(None)) == ("triton", "torch")


def test_the_environment_can_trust_them(gpu, monkeypatch):
    monkeypatch.setenv(ledger.TRUST, "1")
    assert chosen() == ("triton", "torch")
    monkeypatch.setenv(ledger.TRUST, "0")
    assert chosen() == ("torch", "torch")


def test_an_entry_turns_on_its_kernel_and_no_other(gpu):
    gpu(entry_of_solve())
    assert chosen() == ("triton", "torch")
    assert chosen(d=33) == ("triton", "torch"), "padded to the same width"
    assert chosen(dtype="float16") == ("torch", "torch")
    assert chosen(d=128) == ("torch", "torch")
    assert chosen("gated_delta") == ("torch",)


@pytest.mark.parametrize(
    "other", [{"capability": "8.0"}, {"assembler": "ptxas 12.8"}, {"code": "0"}, {"verb": "vjp"}]
)
def test_an_entry_counts_for_what_it_says_only(gpu, other):
    gpu(entry_of_solve()._replace(**other))
    assert chosen() == ("torch", "torch")


def test_a_step_that_may_be_differentiated_needs_the_gradient_of_a_step_too(gpu):
    step = replace(ON_CUDA, verb="extend", shapes=(("q", (1, 1, 4, 64)), *SHAPES))
    of_step = Triton().ledger_entry(pa.GatedDelta(), step)
    gpu(of_step)
    assert Triton().refuses_by_default(pa.GatedDelta(), step) is None
    differentiated = replace(step, differentiated=True)
    assert "have not yet run" in Triton().refuses_by_default(pa.GatedDelta(), differentiated)
    gpu(of_step, of_step._replace(verb="extend_vjp"))
    assert Triton().refuses_by_default(pa.GatedDelta(), differentiated) is None


def test_options_that_select_kernels_are_families_of_their_own(gpu):
    transported = replace(SOLVE, metric="transported")
    family = Triton().ledger_entry(transported, ON_CUDA).family
    assert family == "lucid_solve[metric=transported]:LucidSolveKernels"
    assert entry_of_solve().family == "lucid_solve:LucidSolveKernels"
    of_options = ledger.family_of(pa.Softmax(window=8, softcap=30.0, sink=True), "module:Class")
    assert of_options == "softmax[softcap=given,sink=True]:Class"


def test_no_warning_says_that_an_untried_kernel_was_passed_over(gpu, monkeypatch):
    assert _plan.__wrapped__(SOLVE, ON_CUDA, None, None, discover())[1] is None
    # A kernel that declines is a reason to warn, as before.
    monkeypatch.setattr(Triton, "refuses_by_default", lambda *call: None)
    monkeypatch.setattr(Triton, "refuses_request", lambda *call: "is too old")
    assert "is too old" in _plan.__wrapped__(SOLVE, ON_CUDA, None, None, discover())[1]


def test_arrays_on_a_cpu_and_third_party_backends_are_not_asked(gpu):
    assert Triton().refuses_by_default(SOLVE, replace(ON_CUDA, device="cpu")) is None

    class ThirdParty(kernel_backend.KernelBackend):
        name = "third_party"
        accelerates = frozenset({"cuda"})

    assert ThirdParty().refuses_by_default(SOLVE, ON_CUDA) is None


def test_the_file_of_a_package_is_read(tmp_path, monkeypatch):
    package = tmp_path / "some_kernels"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert ledger.entries("some_kernels") == frozenset()
    entry = ledger.LedgerEntry(
        "laser:LaserKernels", "vjp", "float16", 64, "9.0", "NVRTC 13.0", "abc"
    )
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


def edited(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_the_hash_of_a_kernel_changes_with_its_code_and_all_that_it_uses_and_with_no_more(copied):
    folder, hashed = copied
    before = hashed()
    edited(folder / "softmax/leaf.py", '"""', '"""Changed. ')
    for path, comment in (
        ("softmax/leaf.py", "# The end."),
        ("layout.py", "# The end."),
        ("cuda/softmax_forward.cu", "// The end."),
    ):
        (folder / path).write_text(f"{(folder / path).read_text()}\n{comment}\n")
    edited(folder / "cuda/scan.cu", "__global__", "extern __global__")
    edited(folder / "lucid/solve.py", "return ", "return 1 + ")
    assert hashed() == before
    for file, old, new in (
        ("softmax/leaf.py", "return ", "return 1 + "),
        ("layout.py", "return ", "return 1 + "),
        ("cuda/softmax_forward.cu", "__global__", "extern __global__"),
        ("cuda/running_softmax.cuh", "return", "return 1 +"),
        ("configurations.json", "[64, 32]", "[64, 16]"),
    ):
        before = hashed()
        edited(folder / file, old, new)
        assert hashed() != before, file


def test_every_cuda_file_is_hashed_with_a_kernel():
    rows = (getattr(row, "classes", {"": row}).values() for row in cupy_backend.KERNELS.values())
    modules = {entry.partition(":")[0] for entry in itertools.chain(*rows)}
    hashed = {name for module in modules for name in code_hash._sources(module)}
    assert {path.name for path in FOLDER.iterdir()} <= hashed


def test_the_kernels_of_this_backend_have_different_hashes():
    entries = {entry for entry in triton_backend.KERNELS.values() if isinstance(entry, str)}
    assert len({code_of(entry) for entry in entries}) == len(entries)
