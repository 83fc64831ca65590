"""Row sums of P, a tile of weights, after its rounding to the factors' dtype, by tensor cores.

    l ← l ∘ shrink + P 1

Weights of 16 bits are multiplied by ones on tensor cores, in every one of `COLUMNS` equal columns.
Ordinary additions would first convert each weight to 16 bits and back, which takes as long as its
exponential.
"""

from __future__ import annotations

import triton
import triton.language as tl

COLUMNS = tl.constexpr(16)
"""The least width of a product."""


@triton.jit
def no_sums(FACTOR: tl.constexpr, ROWS: tl.constexpr):
    """l = 0, for weights in the dtype FACTOR."""
    WIDTH: tl.constexpr = 1 if tl.float32 == FACTOR else COLUMNS
    return tl.zeros((ROWS, WIDTH), tl.float32)


@triton.jit
def with_row_sums(total, shrink, p):
    """l after one more tile; `shrink` is (rows, 1)."""
    if p.dtype == tl.float32:
        total = total * shrink + tl.sum(p, 1, keep_dims=True)
    else:
        total = tl.dot(p, tl.full((p.shape[1], COLUMNS), 1.0, p.dtype), total * shrink)
    return total


@triton.jit
def row_sums(total):
    """l (rows)."""
    return tl.max(total, 1)
