"""The inverses of all diagonal super-blocks of LUCID's matrix at once.

    N = (I + L)⁻¹,    L = stril(Φ) diag(β)  for the forward solve,  diag(β) stril(Φ)  backward.

By recursive 2×2 block inversion (`triangular_inverse.py`). `invert_blocks` inverts single tiles in
registers. From these, `left_factors` and `right_factors` compute the inverse of a super-block,

    [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]],

C A⁻¹ first. No entry of such an inverse has a magnitude above 2, for β in [0, 2] and any keys, so
that 16 bits suffice. Grids: one program per tile on the diagonal and head (`invert_blocks`), per
tile of a lower left block and head (`left_factors`), per column of tiles of a lower left block and
head (`right_factors`).

The inverses of super-blocks are stored as rows, (m, T, S). Entries above the diagonal are
initialised to 0, because tiles on the diagonal, which may be larger than the inverted blocks, are
read as a whole.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.lucid.tiles import column_of, reach, weights
from precondattn_triton.tiles import load_rows
from precondattn_triton.triangular_inverse import unit_lower_inverse

CHANNELS = tl.constexpr(32)
"""Channels of keys in one product; both tiles are loaded again for every product."""


@triton.jit
def system_tile(
    keys,
    chunk_scores,
    factor,
    segments,
    head,
    tokens,
    i_start,
    j_start,
    scale,
    shift,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BY_ROW: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """L of rows i and columns j, without the restriction to the lower triangle.

    The scores are products of keys, or, with CHUNK > 0, those of pairs within a chunk, which are
    loaded from `chunk_scores` (m, T, CHUNK).
    """
    if CHUNK > 0:
        column = column_of(j_start, TILE, CHUNK)
        scores = load_rows(chunk_scores, head, tokens, i_start, TILE, TILE, column, CHUNK)
    else:
        scores = tl.zeros((TILE, TILE), tl.float32)
        PART: tl.constexpr = CHANNELS if WIDTH > CHANNELS else WIDTH
        for first in tl.static_range(0, WIDTH, PART):
            i_keys = load_rows(keys, head, tokens, i_start, TILE, PART, first, WIDTH)
            j_keys = load_rows(keys, head, tokens, j_start, TILE, PART, first, WIDTH)
            scores += tl.dot(i_keys, tl.trans(j_keys), input_precision=PRECISION)
    phi_tile = weights(scores, segments, i_start, j_start, scale, shift, HAS_SEGMENTS)
    row = tl.arange(0, TILE)
    if BY_ROW:
        return phi_tile * tl.load(factor + head * tokens + i_start + row)[:, None]
    return phi_tile * tl.load(factor + head * tokens + j_start + row)[None, :]


@triton.jit
def invert_blocks(
    keys,
    chunk_scores,
    factor,
    segments,
    inverse,
    heads,
    tokens,
    scale,
    shift,
    TILE: tl.constexpr,
    SUPER: tl.constexpr,
    LEVELS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BY_ROW: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Write the inverse of every tile on the diagonal, of TILE = 2^LEVELS tokens."""
    head = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0) * TILE
    if HAS_SEGMENTS:
        segments += head // heads * 2 * tokens
    system = system_tile(
        keys, chunk_scores, factor, segments, head, tokens, start, start,
        scale, shift, TILE, WIDTH, CHUNK, BY_ROW, HAS_SEGMENTS, PRECISION,
    )  # fmt: skip
    inverse_tile = unit_lower_inverse(system, TILE, LEVELS, EXACT)
    i, j = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    rows = head * tokens + start + i
    at = inverse + rows * SUPER + column_of(start, TILE, SUPER) + j
    tl.store(at, inverse_tile.to(inverse.dtype.element_ty))


@triton.jit
def left_factors(
    keys,
    chunk_scores,
    factor,
    segments,
    inverse,
    heads,
    tokens,
    scale,
    shift,
    half,
    TILE: tl.constexpr,
    SUPER: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BY_ROW: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write C A⁻¹ to the lower left of every pair of inverted blocks of `half` tokens."""
    head = tl.program_id(1).to(tl.int64)
    if HAS_SEGMENTS:
        segments += head // heads * 2 * tokens
    tiles = half // TILE
    pair, tile = tl.program_id(0) // (tiles * tiles), tl.program_id(0) % (tiles * tiles)
    first = pair * 2 * half
    i_start = first + half + tile // tiles * TILE
    j_start = first + tile % tiles * TILE
    column = column_of(j_start, TILE, SUPER)
    if i_start < tokens:
        total = tl.zeros((TILE, TILE), tl.float32)
        low, high = j_start, first + half
        if HAS_SEGMENTS:
            begin, _ = reach(segments, tokens, i_start, TILE)
            _, end = reach(segments, tokens, j_start, TILE)
            low = tl.maximum(low, begin // TILE * TILE)
            high = tl.minimum(high, end)
        for m_start in range(low, high, TILE):
            system = system_tile(
                keys, chunk_scores, factor, segments, head, tokens, i_start, m_start,
                scale, shift, TILE, WIDTH, CHUNK, BY_ROW, HAS_SEGMENTS, PRECISION,
            )  # fmt: skip
            inverted = load_rows(inverse, head, tokens, m_start, TILE, TILE, column, SUPER)
            total += tl.dot(system.to(inverted.dtype), inverted, input_precision=PRECISION)
        rows = (head * tokens + i_start + tl.arange(0, TILE))[:, None]
        at = inverse + rows * SUPER + column + tl.arange(0, TILE)[None, :]
        tl.store(at, total.to(inverse.dtype.element_ty))


@triton.jit
def right_factors(
    inverse,
    segments,
    heads,
    tokens,
    half,
    TILE: tl.constexpr,
    SUPER: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Replace C A⁻¹ by −B⁻¹ (C A⁻¹) in place, last rows first, since each needs those above it."""
    head = tl.program_id(1).to(tl.int64)
    tiles = half // TILE
    pair, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    second = pair * 2 * half + half
    j_start = pair * 2 * half + tile * TILE
    column = column_of(j_start, TILE, SUPER)
    count = tl.minimum(tiles, (tokens - second) // TILE)
    if HAS_SEGMENTS:
        segments += head // heads * 2 * tokens
        _, end = reach(segments, tokens, j_start, TILE)
        # Rows of later segments are 0 already.
        count = tl.minimum(count, tl.cdiv(tl.maximum(end - second, 0), TILE))
    for back in range(0, count):
        i_start = second + (count - 1 - back) * TILE
        total = tl.zeros((TILE, TILE), tl.float32)
        low = second
        if HAS_SEGMENTS:
            begin, _ = reach(segments, tokens, i_start, TILE)
            low = tl.maximum(low, begin // TILE * TILE)
        for m_start in range(low, i_start + TILE, TILE):
            at = column_of(m_start, TILE, SUPER)
            inverted = load_rows(inverse, head, tokens, i_start, TILE, TILE, at, SUPER)
            left = load_rows(inverse, head, tokens, m_start, TILE, TILE, column, SUPER)
            total += tl.dot(inverted, left, input_precision=PRECISION)
        # No thread may overwrite rows that another thread has not read yet.
        tl.debug_barrier()
        rows = (head * tokens + i_start + tl.arange(0, TILE))[:, None]
        at = inverse + rows * SUPER + column + tl.arange(0, TILE)[None, :]
        tl.store(at, (-total).to(inverse.dtype.element_ty))
        tl.debug_barrier()
