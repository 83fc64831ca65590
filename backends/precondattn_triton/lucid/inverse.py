"""The inverses of LUCID's diagonal super-blocks, all at once.

    N = (I + L)⁻¹,    L = stril(Φ) diag(β)  to solve forward,  diag(β) stril(Φ)  to solve backward.

By recursive 2×2 block inversion (`triangular_inverse.py`): `invert_blocks` does so up to a tile, in
registers. `left_factors` and `right_factors` go on from there to a super-block,

    [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]],

C A⁻¹ first. No entry of such an inverse is larger than 2, for β in [0, 2] and any keys, so 16 bits
hold them.

A super-block's inverse is kept by rows, (m, T, S), with 0 above its diagonal to begin with: that is
read within the tiles on it, whose blocks may be smaller than they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.lucid.tiles import column_of, weights
from precondattn_triton.tiles import load_rows
from precondattn_triton.triangular_inverse import unit_lower_inverse

CHANNELS = tl.constexpr(32)
"""Of keys, that are multiplied at once: both tiles are read anew for every product."""


@triton.jit
def system_tile(
    keys,
    own_scores,
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
    """L of rows i and columns j, without a look at which of them come first.

    The scores are products of keys; or, with CHUNK > 0, those of `own_scores` (m, T, CHUNK), which
    pairs within a chunk have.
    """
    if CHUNK > 0:
        column = column_of(j_start, TILE, CHUNK)
        scores = load_rows(own_scores, head, tokens, i_start, TILE, TILE, column, CHUNK)
    else:
        scores = tl.zeros((TILE, TILE), tl.float32)
        PART: tl.constexpr = CHANNELS if WIDTH > CHANNELS else WIDTH
        for first in tl.static_range(0, WIDTH, PART):
            i_keys = load_rows(keys, head, tokens, i_start, TILE, PART, first, WIDTH)
            j_keys = load_rows(keys, head, tokens, j_start, TILE, PART, first, WIDTH)
            scores += tl.dot(i_keys, tl.trans(j_keys), input_precision=PRECISION)
    found = weights(scores, segments, i_start, j_start, scale, shift, HAS_SEGMENTS)
    place = tl.arange(0, TILE)
    if BY_ROW:
        return found * tl.load(factor + head * tokens + i_start + place)[:, None]
    return found * tl.load(factor + head * tokens + j_start + place)[None, :]


@triton.jit
def invert_blocks(
    keys,
    own_scores,
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
    """Of every tile on the diagonal, of TILE = 2^LEVELS tokens."""
    head = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0) * TILE
    if HAS_SEGMENTS:
        segments += head // heads * tokens
    system = system_tile(
        keys, own_scores, factor, segments, head, tokens, start, start,
        scale, shift, TILE, WIDTH, CHUNK, BY_ROW, HAS_SEGMENTS, PRECISION,
    )  # fmt: skip
    found = unit_lower_inverse(system, TILE, LEVELS, EXACT)
    i, j = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    rows = head * tokens + start + i
    at = inverse + rows * SUPER + column_of(start, TILE, SUPER) + j
    tl.store(at, found.to(inverse.dtype.element_ty))


@triton.jit
def left_factors(
    keys,
    own_scores,
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
    """C A⁻¹ into the lower left of every pair of inverted blocks of half tokens."""
    head = tl.program_id(1).to(tl.int64)
    if HAS_SEGMENTS:
        segments += head // heads * tokens
    tiles = half // TILE
    pair, place = tl.program_id(0) // (tiles * tiles), tl.program_id(0) % (tiles * tiles)
    first = pair * 2 * half
    i_start = first + half + place // tiles * TILE
    j_start = first + place % tiles * TILE
    column = column_of(j_start, TILE, SUPER)
    if i_start < tokens:
        total = tl.zeros((TILE, TILE), tl.float32)
        for m_start in range(j_start, first + half, TILE):
            system = system_tile(
                keys, own_scores, factor, segments, head, tokens, i_start, m_start,
                scale, shift, TILE, WIDTH, CHUNK, BY_ROW, HAS_SEGMENTS, PRECISION,
            )  # fmt: skip
            own = load_rows(inverse, head, tokens, m_start, TILE, TILE, column, SUPER)
            total += tl.dot(system.to(own.dtype), own, input_precision=PRECISION)
        rows = (head * tokens + i_start + tl.arange(0, TILE))[:, None]
        at = inverse + rows * SUPER + column + tl.arange(0, TILE)[None, :]
        tl.store(at, total.to(inverse.dtype.element_ty))


@triton.jit
def right_factors(
    inverse,
    tokens,
    half,
    TILE: tl.constexpr,
    SUPER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """−B⁻¹ (C A⁻¹), in its place: from the last rows to the first, as each needs those above."""
    head = tl.program_id(1).to(tl.int64)
    tiles = half // TILE
    pair, place = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    second = pair * 2 * half + half
    column = column_of(pair * 2 * half + place * TILE, TILE, SUPER)
    count = tl.minimum(tiles, (tokens - second) // TILE)
    for back in range(0, count):
        i_start = second + (count - 1 - back) * TILE
        total = tl.zeros((TILE, TILE), tl.float32)
        for m_start in range(second, i_start + TILE, TILE):
            at = column_of(m_start, TILE, SUPER)
            own = load_rows(inverse, head, tokens, i_start, TILE, TILE, at, SUPER)
            left = load_rows(inverse, head, tokens, m_start, TILE, TILE, column, SUPER)
            total += tl.dot(own, left, input_precision=PRECISION)
        # Nobody may overwrite what another thread has yet to read.
        tl.debug_barrier()
        rows = (head * tokens + i_start + tl.arange(0, TILE))[:, None]
        at = inverse + rows * SUPER + column + tl.arange(0, TILE)[None, :]
        tl.store(at, (-total).to(inverse.dtype.element_ty))
        tl.debug_barrier()
