"""Kernels that call one device function of the backend, for tests of that function alone."""

import triton
import triton.language as tl

from precondattn_triton.recurrence.channel_decay import between, sums_over
from precondattn_triton.triangular_inverse import unit_lower_inverse


@triton.jit
def inverse(strict, result, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(result + at, unit_lower_inverse(tl.load(strict + at), SIZE, LEVELS, "ieee"))


@triton.jit
def gates_to_the_middle(g, result, level, SIZE: tl.constexpr):
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    sums = sums_over(between(i, j, level), tl.load(g + i * SIZE + j), True, "tf32")
    tl.store(result + i * SIZE + j, sums)
