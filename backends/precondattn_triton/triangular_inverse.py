"""The inverse of a unit lower triangular tile, in registers.

    N = (I + L)⁻¹,    L strictly lower triangular

by recursive 2×2 block inversion. When N holds the inverses of the diagonal blocks of w rows,

    [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]],    so    N ← N − N (L ∘ lower left) N,

for all pairs of blocks at once, from w = 1 up to half a tile. Doubling the Neumann series instead
would lose all digits on keys that nearly coincide.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unit_lower_inverse(strict, SIZE: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """N of L (SIZE, SIZE), SIZE = 2^LEVELS; entries on and above the diagonal of L are ignored."""
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    # Blocks of w = 1 rows, where A and B are 1.
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where((j % 2 == 0) & (i == j + 1), strict, 0.0)
    for level in range(1, LEVELS):
        i_block, j_block = i >> level, j >> level
        is_lower_left = (j_block % 2 == 0) & (i_block == j_block + 1)
        left = tl.dot(inverse, tl.where(is_lower_left, strict, 0.0), input_precision=PRECISION)
        inverse -= tl.dot(left, inverse, input_precision=PRECISION)
    return inverse
