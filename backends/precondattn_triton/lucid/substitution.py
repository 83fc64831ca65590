"""Block substitution with LUCID's matrix, one super-block after another; Φ is never stored.

Forward, from the first super-block J to the last, with N_J of `inverse.py` and R = v,

    ρ_J = N_J R_J,    y_J = β_J ρ_J,    R_I −= Φ_IJ y_J  for all later I;

backward, from the last to the first, with R = dy,

    X_J = N_Jᵀ R_J,    dv_J = β_J X_J,    R_I −= Φ_JIᵀ dv_J  for all earlier I.

Φ is symmetric, so that one kernel, `update`, serves both directions. In PaTH's metric its keys are
the rows at the border between the two super-blocks (`borders.py`), and Φ is symmetric again. In
products of 16 bits, right-hand sides are divided by a power of two for each channel and super-block
of S tokens, so that the largest is at most 2¹² / S: since no entry of N or β exceeds 2, no quotient
y exceeds 2¹⁴, which float16 represents, and right-hand sides that are far smaller keep their
digits. Kernels that write R also write the largest magnitude of each of its tiles. Grids: one
program per tile of rows of a super-block (`apply_inverse`) or of all later or earlier rows
(`update`), head and block of channels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.lucid.tiles import column_of, highest_difference, phi, reach
from precondattn_triton.tiles import load_rows


@triton.jit
def apply_inverse(
    inverse,
    factor,
    segments,
    right,
    largest,
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
    HAS_SEGMENTS: tl.constexpr,
    SCALED: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    SUPER: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Solve a tile of rows of the super-block at `start`, for a block of channels.

    `largest` (m, T / ROWS, STEP) has the largest magnitudes of tiles of R. y or dv is written to
    `out` (b, s, n, e), and, divided by powers of two, to `solved` (m, T, STEP) as an operand; the
    powers are written to `sizes` (m, STEP). With β, ρ is written to `rho` (b, s, n, e) forward.
    Backward it is read, and `d_factor` (chunks, m, T) gets the part of these channels in
    dβ = X · ρ.
    """
    head = tl.program_id(1).to(tl.int64)
    b, n = head // heads, head % heads
    first = tl.program_id(2) * WIDTH
    channel = first + tl.arange(0, WIDTH).to(tl.int64)
    i_start = start + tl.program_id(0) * TILE
    end = tl.minimum(start + SUPER, tokens)

    size = tl.full((WIDTH,), 1.0, tl.float32)
    if SCALED:
        tile = start // ROWS + tl.arange(0, SUPER // ROWS)
        at = largest + (head * (tokens // ROWS) + tile)[:, None] * STEP + channel[None, :]
        of_tiles = tl.load(at, mask=(tile < end // ROWS)[:, None], other=0.0)
        highest = tl.max(of_tiles, axis=0)
        least = tl.where(highest > 0, highest, 1.0) * (SUPER / 4096)
        exponent = tl.ceil(tl.log2(least))
        # The reciprocals of these powers are normal numbers too.
        size = tl.exp2(tl.minimum(tl.maximum(exponent, -126.0), 126.0))
        if i_start == start:
            tl.store(sizes + head * STEP + channel, size)

    reciprocal = 1.0 / size
    total = tl.zeros((TILE, WIDTH), tl.float32)
    low, high = start, i_start + TILE
    if BACKWARD:
        low, high = i_start, end
    if HAS_SEGMENTS:
        segments += b * 2 * tokens
        begin_of_rows, end_of_rows = reach(segments, tokens, i_start, TILE)
        low = tl.maximum(low, begin_of_rows // TILE * TILE)
        high = tl.minimum(high, end_of_rows)
    for j_start in range(low, high, TILE):
        if BACKWARD:
            column = column_of(i_start, TILE, SUPER)
            block = load_rows(inverse, head, tokens, j_start, TILE, TILE, column, SUPER)
            block = tl.trans(block)
        else:
            column = column_of(j_start, TILE, SUPER)
            block = load_rows(inverse, head, tokens, i_start, TILE, TILE, column, SUPER)
        sides = load_rows(right, head, tokens, j_start, TILE, WIDTH, first, STEP)
        sides = (sides * reciprocal[None, :]).to(block.dtype)
        total += tl.dot(block, sides, input_precision=PRECISION)

    token = i_start + tl.arange(0, TILE).to(tl.int64)
    row = head * tokens + token
    beta = tl.load(factor + row)
    result = total * beta[:, None]
    operand = result.to(solved.dtype.element_ty)
    tl.store(solved + row[:, None] * STEP + channel[None, :], operand)
    inside = (token < s)[:, None] & (channel < width)[None, :]
    at = b * out_b + n * out_n + token[:, None] * out_s + channel[None, :] * out_e
    values = result * size[None, :]
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)
    if HAS_BETA:
        total *= size[None, :]
        at = rho + b * rho_b + n * rho_n + token[:, None] * rho_s + channel[None, :] * rho_e
        if BACKWARD:
            rho_tile = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            part = d_factor + (tl.program_id(2) * tl.num_programs(1) + head) * tokens
            tl.store(part + token, tl.sum(total * rho_tile, axis=1))
        else:
            tl.store(at, total.to(rho.dtype.element_ty), mask=inside)


@triton.jit
def update(
    keys,
    segments,
    solved,
    sizes,
    right,
    largest,
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
    """R_I −= Φ_IJ y_J for the super-block J at `start`, a tile of rows and a block of channels.

    The tile of rows of the first program begins at `i_first`. With borders between super-blocks,
    `keys` are those of the lowest level; those of the next follow after `keys_of_level` elements.
    """
    head = tl.program_id(1).to(tl.int64)
    if HAS_SEGMENTS:
        segments += head // heads * 2 * tokens
    first = tl.program_id(2) * WIDTH
    i_start = i_first + tl.program_id(0) * ROWS
    low, high = start, tl.minimum(start + SUPER, tokens)
    if HAS_SEGMENTS:
        begin, end = reach(segments, tokens, i_start, ROWS)
        low = tl.maximum(low, begin // COLUMNS * COLUMNS)
        high = tl.minimum(high, end)
        if low >= high:
            return
    if HAS_BORDERS:
        keys += highest_difference(i_start // SUPER, start // SUPER) * keys_of_level
    i_keys = load_rows(keys, head, tokens, i_start, ROWS, KEY_WIDTH, 0, KEY_WIDTH)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for j_start in range(low, high, COLUMNS):
        j_keys = load_rows(keys, head, tokens, j_start, COLUMNS, KEY_WIDTH, 0, KEY_WIDTH)
        weights = phi(
            i_keys, j_keys, segments, i_start, j_start, scale, shift, HAS_SEGMENTS, PRECISION
        )
        values = load_rows(solved, head, tokens, j_start, COLUMNS, WIDTH, first, STEP)
        total += tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
    channel = first + tl.arange(0, WIDTH)
    if SCALED:
        total *= tl.load(sizes + head * STEP + channel)[None, :]
    row = head * tokens + i_start + tl.arange(0, ROWS)
    at = right + row[:, None] * STEP + channel[None, :]
    sides = tl.load(at) - total
    tl.store(at, sides)
    # Right sides of the super-block that is solved next are complete. Rows that share no segment
    # with this one share none with any solved before it: their magnitudes are as loaded.
    if SCALED and tl.abs(i_start // SUPER - start // SUPER) == 1:
        tile = head * (tokens // ROWS) + i_start // ROWS
        tl.store(largest + tile * STEP + channel, tl.max(tl.abs(sides), axis=0))
