"""Kernels around pieces of the backend's kernels, for tests that look at one piece alone."""

import triton
import triton.language as tl

from precondattn_triton.recurrence.chunk_tiles import pairs_of
from precondattn_triton.triangular_inverse import unit_lower_inverse


@triton.jit
def inverse(strict, found, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(found + at, unit_lower_inverse(tl.load(strict + at), SIZE, LEVELS, "ieee"))


@triton.jit
def fading(g, found, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(found + at, pairs_of(g, 0, SIZE, False))
