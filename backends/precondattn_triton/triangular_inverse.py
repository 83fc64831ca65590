"""(I + L)⁻¹ of one tile, L being strictly lower triangular, in registers.

By recursive 2×2 block inversion. Where the diagonal blocks of w rows are inverted and stand in X,

    [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]],    that is    X ← X − X (L ∘ lower left) X,

for all pairs of blocks at once, from w = 1 up to the tile. Doubling the Neumann series instead
would lose every digit on keys that nearly coincide.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unit_lower_inverse(system, LEVELS: tl.constexpr, EXACT: tl.constexpr):
    """Of L (2^LEVELS, 2^LEVELS); what stands on or above the diagonal is not looked at."""
    SIZE: tl.constexpr = system.shape[0]
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    # Of pairs of rows, where A and B are 1.
    found = tl.where(i == j, 1.0, 0.0) - tl.where((j % 2 == 0) & (i == j + 1), system, 0.0)
    for level in range(1, LEVELS):
        i_block, j_block = i >> level, j >> level
        is_lower_left = (j_block % 2 == 0) & (i_block == j_block + 1)
        left = tl.dot(found, tl.where(is_lower_left, system, 0.0), input_precision=EXACT)
        found -= tl.dot(left, found, input_precision=EXACT)
    return found
