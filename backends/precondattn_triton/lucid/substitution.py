"""Block substitution with LUCID's matrix, super-block after super-block; Φ is never stored.

Forward, from the first super-block J to the last, with N_J of `inverse.py` and R = v,

    ρ_J = N_J R_J,    y_J = β_J ρ_J,    R_I −= Φ_IJ y_J  for all later I;

backward, from the last to the first, with R = dy,

    X_J = N_Jᵀ R_J,    dv_J = β_J X_J,    R_I −= Φ_JIᵀ dv_J  for all earlier I.

Φ is symmetric, so that one kernel, `update`, serves both. In PaTH's metric its keys are rows at the
border between the two super-blocks (`borders.py`), symmetric again. Products of 16 bits take
y divided by a power of two, that of the largest right side of its channel and super-block: since no
entry of N is larger than 2, no quotient is larger than 4 S, far from where float16 ends.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.lucid.tiles import column_of, highest_difference, phi
from precondattn_triton.tiles import load_rows


@triton.jit
def apply_inverse(
    inverse,
    factor,
    right,
    solved,
    sizes,
    rho,
    out,
    d_factor,
    s,
    heads,
    tokens,
    start,
    width,
    out_b,
    out_s,
    out_n,
    out_e,
    rho_b,
    rho_s,
    rho_n,
    rho_e,
    BACKWARD: tl.constexpr,
    HAS_BETA: tl.constexpr,
    SCALED: tl.constexpr,
    TILE: tl.constexpr,
    SUPER: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A tile of rows of one super-block, which begins at `start`, and some channels.

    `out` (b, s, n, e) gets y or dv; `solved` (m, T, STEP) the same as an operand, by powers of two
    that go to `sizes` (m, STEP). With a β, `rho` (b, s, n, e) gets ρ forward; backward it is
    read, and `d_factor` (chunks, m, T) gets the channels' part of dβ = X · ρ.
    """
    head = tl.program_id(1).to(tl.int64)
    b, n = head // heads, head % heads
    first = tl.program_id(2) * WIDTH
    channel = first + tl.arange(0, WIDTH).to(tl.int64)
    i_start = start + tl.program_id(0) * TILE
    end = tl.minimum(start + SUPER, tokens)

    size = tl.full((WIDTH,), 1.0, tl.float32)
    if SCALED:
        largest = tl.zeros((WIDTH,), tl.float32)
        for j_start in range(start, end, TILE):
            own = load_rows(right, head, tokens, j_start, TILE, WIDTH, first, STEP)
            largest = tl.maximum(largest, tl.max(tl.abs(own), axis=0))
        exponent = tl.ceil(tl.log2(tl.where(largest > 0, largest, 1.0)))
        size = tl.exp2(tl.minimum(tl.maximum(exponent, -126.0), 127.0))
        if i_start == start:
            tl.store(sizes + head * STEP + channel, size)

    total = tl.zeros((TILE, WIDTH), tl.float32)
    low, high = start, i_start + TILE
    if BACKWARD:
        low, high = i_start, end
    for j_start in range(low, high, TILE):
        if BACKWARD:
            column = column_of(i_start, TILE, SUPER)
            block = load_rows(inverse, head, tokens, j_start, TILE, TILE, column, SUPER)
            block = tl.trans(block)
        else:
            column = column_of(j_start, TILE, SUPER)
            block = load_rows(inverse, head, tokens, i_start, TILE, TILE, column, SUPER)
        sides = load_rows(right, head, tokens, j_start, TILE, WIDTH, first, STEP)
        sides = (sides / size[None, :]).to(block.dtype)
        total += tl.dot(block, sides, input_precision=PRECISION)

    token = i_start + tl.arange(0, TILE).to(tl.int64)
    place = head * tokens + token
    beta = tl.load(factor + place)
    result = total * beta[:, None]
    operand = result.to(solved.dtype.element_ty)
    tl.store(solved + place[:, None] * STEP + channel[None, :], operand)
    inside = (token < s)[:, None] & (channel < width)[None, :]
    at = b * out_b + n * out_n + token[:, None] * out_s + channel[None, :] * out_e
    values = result * size[None, :]
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)
    if HAS_BETA:
        total *= size[None, :]
        at = rho + b * rho_b + n * rho_n + token[:, None] * rho_s + channel[None, :] * rho_e
        if BACKWARD:
            own = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            part = d_factor + (tl.program_id(2) * tl.num_programs(1) + head) * tokens
            tl.store(part + token, tl.sum(total * own, axis=1))
        else:
            tl.store(at, total.to(rho.dtype.element_ty), mask=inside)


@triton.jit
def update(
    keys,
    segments,
    solved,
    sizes,
    right,
    heads,
    tokens,
    start,
    i_first,
    keys_of_level,
    scale,
    shift,
    HAS_BORDERS: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUPER: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """R_I −= Φ_IJ y_J of the super-block J that begins at `start`, for a tile of rows and channels.

    The first program's tile of rows begins at `i_first`. With borders between super-blocks, keys
    are those of the lowest level, and `keys_of_level` numbers on are those of the next.
    """
    head = tl.program_id(1).to(tl.int64)
    if HAS_SEGMENTS:
        segments += head // heads * tokens
    first = tl.program_id(2) * WIDTH
    i_start = i_first + tl.program_id(0) * ROWS
    if HAS_BORDERS:
        keys += highest_difference(i_start // SUPER, start // SUPER) * keys_of_level
    i_keys = load_rows(keys, head, tokens, i_start, ROWS, KEY_WIDTH, 0, KEY_WIDTH)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for j_start in range(start, tl.minimum(start + SUPER, tokens), COLUMNS):
        j_keys = load_rows(keys, head, tokens, j_start, COLUMNS, KEY_WIDTH, 0, KEY_WIDTH)
        weights = phi(
            i_keys, j_keys, segments, i_start, j_start, scale, shift, HAS_SEGMENTS, PRECISION
        )
        values = load_rows(solved, head, tokens, j_start, COLUMNS, WIDTH, first, STEP)
        total += tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
    channel = first + tl.arange(0, WIDTH)
    if SCALED:
        total *= tl.load(sizes + head * STEP + channel)[None, :]
    place = head * tokens + i_start + tl.arange(0, ROWS)
    at = right + place[:, None] * STEP + channel[None, :]
    tl.store(at, tl.load(at) - total)
