"""The work of kernels: packed calls do not compute tiles of other segments, and counts of launches.

Borders of segments are those of tiles, so that a packed call and separate ones compute the same
tiles. Work is counted in Triton's interpreter, by the outermost function of a launch.
"""

import sys
from collections import Counter
from contextlib import contextmanager
from unittest.mock import patch

import pytest

pytest.importorskip("triton")

from triton.runtime import interpreter

from precondattn_conformance.tolerance import error
from precondattn_kernel_tools.triton_interpreter import patch_interpreter
from precondattn_triton.lucid import matrix as lucid_matrix
from tests.backends.triton.calls import KernelCall, scaled

LENGTHS = 48, 16, 32
LINEAR = {"cross", "cross_back", "_blocks", "_blocks_gradient", "_chunk_gradient"}
"""Kernels whose work for a token depends on the whole length."""


@contextmanager
def counted(operation, size):
    """A context that counts an operation by kernel: `size` of its operands."""
    patch_interpreter()
    builder = interpreter.InterpreterBuilder
    original, found = getattr(builder, operation), Counter()

    def counting(self, x, *others):
        found[outermost_function()] += size(x, *others)
        return original(self, x, *others)

    with patch.object(builder, operation, counting):
        yield found


def outermost_function():
    """The name of the kernel that runs."""
    frame, found = sys._getframe(), ""
    while frame.f_code.co_name != "watched_launch":
        module = frame.f_globals["__name__"]
        is_kernel = not module.startswith(("triton.", "precondattn_kernel_tools", "tests."))
        found = frame.f_code.co_name if is_kernel else found
        frame = frame.f_back
    return found


EXPONENTIALS = ("create_exp", lambda x: x.data.size)
PRODUCTS = ("create_dot", lambda a, b, *_: a.data.shape[0] * a.data.shape[1] * b.data.shape[1])


@pytest.mark.parametrize(
    ("expression", "counting", "spread"),
    [
        ("laser(softmax[causal=false])", PRODUCTS, 1),
        ("laser", EXPONENTIALS, 100),
        ("path", PRODUCTS, 1),
        ("lucid_solve[beta=true]", PRODUCTS, 1),
        ("lucid_solve[metric=transported]", PRODUCTS, 1),
    ],
)
def test_a_packed_call_computes_the_tiles_of_each_sequence(expression, counting, spread):
    options = {
        "e": 16,
        # Whether LUCID's update sums keys depends on the length of a call.
        "patches": {f"{lucid_matrix.__name__}.LucidMatrix._supports_key_sums": lambda *_: False},
        "change": scaled(v=spread),
    }
    packed = KernelCall(expression, sum(LENGTHS), segments=(LENGTHS,), **options)
    x, d_out = packed.arrays()
    with counted(*counting) as of_packed:
        out, gradients, _ = packed.run(x, d_out)
    of_each, start = Counter(), 0
    for length in LENGTHS:
        own = slice(start, start + length)
        alone = {name: a[:, own] if a.ndim > 1 else a for name, a in x.items()}
        with counted(*counting) as of_one:
            call = KernelCall(expression, length, **options)
            one, d_one, _ = call.run(alone, d_out[:, own])
        of_each += of_one
        pairs = [(out, one), *((gradients[name], d_one[name]) for name in x if x[name].ndim > 1)]
        for whole, part in pairs:
            assert error(whole[:, own].double().numpy(), part.double().numpy()) < 1e-5
        start += length
    assert of_each
    for kernel in (of_each.keys() | of_packed.keys()) - LINEAR:
        assert of_packed[kernel] == of_each[kernel], kernel
