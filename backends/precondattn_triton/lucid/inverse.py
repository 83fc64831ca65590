"""The inverses of all diagonal tiles of LUCID's matrix, in one launch.

    N = (I + L)⁻¹,    L = stril(Φ) diag(β)  for the forward solve,  diag(β) stril(Φ)  backward.

Blocks of 32 tokens are inverted in registers (`triangular_inverse.py`). The inverses of two such
blocks give that of a tile of 64,

    [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]].

No entry of such an inverse has a magnitude above 2, for β in [0, 2] and any keys, so that 16 bits
suffice. Grid: one program per tile on the diagonal and head. Larger blocks are not inverted: they
are solved by substitution (`substitution.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.lucid.tiles import column_of, scores_in_parts, weights
from precondattn_triton.tiles import load_rows
from precondattn_triton.triangular_inverse import unit_lower_inverse


@triton.jit
def system_tile(
    keys, chunk_scores, factor, segments, head, tokens, i_start, j_start, scale, shift,
    TILE: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, BY_ROW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """L of rows i and columns j, without the restriction to the lower triangle.

    The scores are products of keys, or, with CHUNK > 0, those of pairs within a chunk, which are
    loaded from `chunk_scores` (m, T, CHUNK).
    """
    if CHUNK > 0:
        column = column_of(j_start, TILE, CHUNK)
        scores = load_rows(chunk_scores, head, tokens, i_start, TILE, TILE, column, CHUNK)
    else:
        scores = scores_in_parts(keys, head, tokens, i_start, j_start, TILE, WIDTH, PRECISION)
    phi_tile = weights(scores, segments, i_start, j_start, scale, shift)
    row = tl.arange(0, TILE)
    if BY_ROW:
        return phi_tile * tl.load(factor + head * tokens + i_start + row)[:, None]
    return phi_tile * tl.load(factor + head * tokens + j_start + row)[None, :]


@triton.jit
def invert_blocks(
    keys, border_keys, chunk_scores, factor, segments, inverse,
    heads, tokens, cached, scale, shift,
    TILE: tl.constexpr, HALF: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr, BORDER_CHUNK: tl.constexpr, BY_ROW: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Write the inverse of every tile on the diagonal from token `cached` on to `inverse`.

    It is (m, T, TILE). HALF = 2^LEVELS is the whole tile, or half of it. `border_keys` and
    BORDER_CHUNK are those of scores between its halves.
    """
    head = tl.program_id(1).to(tl.int64)
    start = cached + tl.program_id(0) * TILE
    if segments is not None:
        segments += head // heads * 2 * tokens
    system = system_tile(
        keys, chunk_scores, factor, segments, head, tokens, start, start,
        scale, shift, HALF, WIDTH, CHUNK, BY_ROW, PRECISION,
    )  # fmt: skip
    dtype = inverse.dtype.element_ty
    first = unit_lower_inverse(system, HALF, LEVELS, EXACT).to(dtype)
    i, j = tl.arange(0, HALF)[:, None], tl.arange(0, HALF)[None, :]
    at = inverse + (head * tokens + start + i) * TILE + j
    tl.store(at, first)
    if TILE > HALF:
        middle = start + HALF
        system = system_tile(
            keys, chunk_scores, factor, segments, head, tokens, middle, middle,
            scale, shift, HALF, WIDTH, CHUNK, BY_ROW, PRECISION,
        )  # fmt: skip
        second = unit_lower_inverse(system, HALF, LEVELS, EXACT).to(dtype)
        between = system_tile(
            border_keys, chunk_scores, factor, segments, head, tokens, middle, start,
            scale, shift, HALF, WIDTH, BORDER_CHUNK, BY_ROW, PRECISION,
        )  # fmt: skip
        left = tl.dot(between.to(dtype), first, input_precision=PRECISION).to(dtype)
        corner = -tl.dot(second, left, input_precision=PRECISION)
        tl.store(at + HALF, tl.zeros((HALF, HALF), dtype))
        tl.store(at + HALF * TILE, corner.to(dtype))
        tl.store(at + HALF * TILE + HALF, second)
