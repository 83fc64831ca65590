"""flash-linear-attention's kernels as peers, if it is installed; interpreted without a GPU.

`conformance/gpu/twin.sh FOLDER peers` runs this with the versions of the GPU machine.
"""

import importlib
import sys
from importlib.util import find_spec

import pytest

if not find_spec("fla"):
    pytest.skip("flash-linear-attention is not installed", allow_module_level=True)

import torch
import triton.language as tl

import precondattn as pa
from precondattn_conformance.bench import measure
from precondattn_conformance.bench.cases import BenchCase, layout
from precondattn_conformance.bench.peers import FLA, KERNELS, NAIVE
from tests.conformance import fla_stub

pytestmark = pytest.mark.filterwarnings("ignore")  # Another package warns.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = layout(t=70, h=2, d=16)
GROUPED = ("linear", "retention", "gla", "gsa", "path")
"""Mechanisms whose queries may share keys; in the others, values may share keys."""


class Index(int):
    """The index of a loop in a kernel: a number if interpreted, a scalar if compiled."""

    def to(self, dtype):
        return tl.full([], int(self), dtype)


@pytest.fixture(scope="module", autouse=True)
def interpreted():
    """Run kernels on the CPU if there is no GPU."""
    if DEVICE == "cuda":
        return
    from precondattn_kernel_tools.triton_interpreter import patch_interpreter

    patch_interpreter()
    for module in fla_stub.MODULES:
        importlib.import_module(module)
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.ops."):
            module.range = lambda *ends: map(Index, range(*ends))


def assert_agrees(of, text, sizes, work, dtype):
    """Assert agreement with the oracle within a benchmark's bounds; raises `WrongResultError`."""
    measure.checked_run(of, BenchCase(text, text, work, sizes, "torch", dtype, device=DEVICE))


@pytest.mark.parametrize("text", FLA)
def test_a_kernel_agrees_with_the_oracle(text):
    """Output and gradients agree in half precision."""
    sizes = SIZES._replace(n=1 if text in GROUPED else 2, values_per_head=2)
    of = KERNELS.computation(pa.parse(text))
    assert_agrees(of, text, sizes, "forward_backward", "float16")


@pytest.mark.parametrize("text", NAIVE.adapters)
def test_a_naive_reference_agrees_with_the_oracle(text):
    of = NAIVE.computation(pa.parse(text))
    assert_agrees(of, text, SIZES, "forward", "float32")
