"""The inverse of a unit lower triangular tile, in registers.

    N = (I + L)⁻¹,    L strictly lower triangular

by recursive 2×2 block inversion. Where the diagonal blocks of w rows are inverted and stand in N,

    [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]],    that is    N ← N − N (L ∘ lower left) N,

for all pairs of blocks at once, from w = 1 up to half a tile. Doubling the Neumann series instead
would lose every digit on keys that nearly coincide.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unit_lower_inverse(strict, SIZE: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """N of L (SIZE, SIZE), SIZE = 2^LEVELS; on and above L's diagonal nothing is looked at."""
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    # Of pairs of rows, where A and B are 1.
    found = tl.where(i == j, 1.0, 0.0) - tl.where((j % 2 == 0) & (i == j + 1), strict, 0.0)
    for level in range(1, LEVELS):
        i_block, j_block = i >> level, j >> level
        is_lower_left = (j_block % 2 == 0) & (i_block == j_block + 1)
        left = tl.dot(found, tl.where(is_lower_left, strict, 0.0), input_precision=PRECISION)
        found -= tl.dot(left, found, input_precision=PRECISION)
    return found
