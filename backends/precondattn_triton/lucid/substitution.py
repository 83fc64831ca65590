"""Block substitution with LUCID's matrix, one super-block after another.

Forward, for the super-blocks J of S tokens from the first to the last, with R = v, and backward,
from the last to the first, with R = dy, two launches each:

    update        P_J = Σ_I Φ_JI y_I  over the super-blocks I solved before;  Φ_JJ is stored
    substitute    for the tiles i of J, in the order of the solve, with N_i of `inverse.py`,

        ρ_i = N_i (R_i − P_i − Σ_j Φ_ij y_j),    y_i = β_i ρ_i,    over the tiles j of J before i.

Backward, N_iᵀ replaces N_i, X replaces ρ and dv replaces y. Φ is symmetric, so that the same
kernels serve both directions. In PaTH's metric the keys of a tile are the rows at the border
between it and the other tile (`borders.py`), and Φ is symmetric again.

`update` recomputes Φ from the keys, and sums over all columns in registers: P is written once and
read once. Grid: per tile of rows of J and head, one program for Φ_JJ, and one per block of channels
and part of the columns for P. The columns have several parts only where there are too few tiles of
rows for the GPU. Parts are summed in their order.

`substitute` can not divide the rows of a head between programs, since each needs those before it.
Grid: one program per block of channels and head, each for all rows of J. They read the same Φ_JJ,
which is why it is stored: S² numbers per head, used again for every super-block.

In products of 16 bits, every tile of y is divided by a power of two for each channel, so that no
quotient exceeds 2¹⁴ and the largest exceeds 2¹³. When J is solved, all of its tiles are divided by
the largest of these powers instead, which `update` multiplies with once per super-block. So results
that are far smaller than those of other super-blocks keep their digits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.lucid.tiles import (
    column_of,
    highest_difference,
    phi,
    reach,
    scores_in_parts,
    weights,
)
from precondattn_triton.tiles import load_rows

LARGEST = tl.constexpr(14)
"""The exponent that no quotient in 16 bits exceeds; float16 ends before 2¹⁶."""


@triton.jit
def store_tiles(
    keys, chunk_scores, segments, matrix, head, tokens, i_start, low, high, start,
    keys_of_level, scale, shift,
    BACKWARD: tl.constexpr, HAS_BORDERS: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SUPER: tl.constexpr, CHUNK: tl.constexpr,
    KEY_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store Φ of a tile of rows and the columns from `low` to `high` of the same super-block.

    With borders, ROWS = COLUMNS, and the tile on the diagonal is left out.
    """
    row = (head * SUPER + i_start - start + tl.arange(0, ROWS))[:, None]
    at = matrix + row * SUPER - start + tl.arange(0, COLUMNS)[None, :]
    if HAS_BORDERS:
        for j_start in range(low, high, COLUMNS):
            if i_start != j_start:
                is_within = False
                if CHUNK > COLUMNS:
                    is_within = i_start // CHUNK == j_start // CHUNK
                if is_within:
                    # Only scores of a later row with an earlier column are stored.
                    first, second = tl.minimum(i_start, j_start), tl.maximum(i_start, j_start)
                    column = column_of(first, COLUMNS, CHUNK)
                    scores = load_rows(
                        chunk_scores, head, tokens, second, ROWS, COLUMNS, column, CHUNK
                    )
                    if BACKWARD:
                        scores = tl.trans(scores)
                else:
                    level = highest_difference(i_start // CHUNK, j_start // CHUNK)
                    scores = scores_in_parts(
                        keys + level * keys_of_level, head, tokens, i_start, j_start,
                        COLUMNS, KEY_WIDTH, PRECISION,
                    )  # fmt: skip
                tile = weights(scores, segments, i_start, j_start, scale, shift, HAS_SEGMENTS)
                tl.store(at + j_start, tile.to(matrix.dtype.element_ty))
    else:
        i_keys = load_rows(keys, head, tokens, i_start, ROWS, KEY_WIDTH, 0, KEY_WIDTH)
        for j_start in range(low, high, COLUMNS):
            j_keys = load_rows(keys, head, tokens, j_start, COLUMNS, KEY_WIDTH, 0, KEY_WIDTH)
            tile = phi(
                i_keys, j_keys, segments, i_start, j_start, scale, shift, HAS_SEGMENTS, PRECISION
            )
            tl.store(at + j_start, tile.to(matrix.dtype.element_ty))


@triton.jit
def add_columns(
    total, keys, segments, solved, head, tokens, i_start, low, high, first, scale, shift,
    HAS_SEGMENTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add Φ y of the columns from `low` to `high` to `total`, for a tile of rows."""
    i_keys = load_rows(keys, head, tokens, i_start, ROWS, KEY_WIDTH, 0, KEY_WIDTH)
    for j_start in range(low, high, COLUMNS):
        j_keys = load_rows(keys, head, tokens, j_start, COLUMNS, KEY_WIDTH, 0, KEY_WIDTH)
        tile = phi(
            i_keys, j_keys, segments, i_start, j_start, scale, shift, HAS_SEGMENTS, PRECISION
        )
        values = load_rows(solved, head, tokens, j_start, COLUMNS, WIDTH, first, STEP)
        total += tl.dot(tile.to(values.dtype), values, input_precision=PRECISION)
    return total


@triton.jit
def update(
    keys,
    chunk_scores,
    segments,
    solved,
    sizes,
    sums,
    matrix,
    heads,
    tokens,
    start,
    past,
    per_part,
    keys_of_level,
    scale,
    shift,
    BACKWARD: tl.constexpr,
    HAS_BORDERS: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    SUPER: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """P or Φ of the super-block at `start`, for a tile of rows.

    The first program of a tile writes Φ to `matrix` (m, SUPER, SUPER): columns before the rows, or,
    backward, after them. Each of the others writes P to `sums` (parts, m, SUPER, STEP), for a block
    of channels and a part of the columns: those are the `past` tokens before the super-block, or,
    backward, after it, and a part has `per_part` of them. With borders, `keys`
    (levels, m, T, KEY_WIDTH) have `keys_of_level` elements for each level.
    """
    head = tl.program_id(1).to(tl.int64)
    if HAS_SEGMENTS:
        segments += head // heads * 2 * tokens
    i_start = start + tl.program_id(0) * ROWS
    end = tl.minimum(start + SUPER, tokens)
    # Columns of the same segments, of this tile of rows and of those that are substituted together.
    UNIT: tl.constexpr = TILE if TILE > ROWS else ROWS
    WIDER: tl.constexpr = TILE if TILE > COLUMNS else COLUMNS
    begin_of_rows, end_of_rows = 0, tokens
    if HAS_SEGMENTS:
        begin_of_rows, end_of_rows = reach(segments, tokens, i_start // UNIT * UNIT, UNIT)
        begin_of_rows = begin_of_rows // WIDER * WIDER
        end_of_rows = tl.cdiv(end_of_rows, WIDER) * WIDER

    if tl.program_id(2) == 0:
        SIDE: tl.constexpr = COLUMNS if HAS_BORDERS else ROWS
        for row in range(0, ROWS, SIDE):
            row_start = i_start + row
            if BACKWARD:
                low, high = row_start // COLUMNS * COLUMNS, tl.minimum(end, end_of_rows)
            else:
                low, high = tl.maximum(start, begin_of_rows), row_start + SIDE
            store_tiles(
                keys, chunk_scores, segments, matrix, head, tokens, row_start, low, high, start,
                keys_of_level, scale, shift, BACKWARD, HAS_BORDERS, HAS_SEGMENTS, SIDE, COLUMNS,
                SUPER, CHUNK, KEY_WIDTH, PRECISION,
            )  # fmt: skip
    else:
        CHANNELS: tl.constexpr = STEP // WIDTH
        first = (tl.program_id(2) - 1) % CHANNELS * WIDTH
        part = (tl.program_id(2) - 1) // CHANNELS
        low = part * per_part
        high = tl.minimum(low + per_part, past)
        if BACKWARD:
            low, high = low + end, high + end
        low, high = tl.maximum(low, begin_of_rows), tl.minimum(high, end_of_rows)
        channel = first + tl.arange(0, WIDTH)
        total = tl.zeros((ROWS, WIDTH), tl.float32)
        if SCALED or HAS_BORDERS:
            for block in range(low // SUPER, tl.cdiv(high, SUPER)):
                level_keys = keys
                if HAS_BORDERS:
                    level = highest_difference(i_start // CHUNK, block * SUPER // CHUNK)
                    level_keys = keys + level * keys_of_level
                block_low = tl.maximum(low, block * SUPER)
                block_high = tl.minimum(high, (block + 1) * SUPER)
                if SCALED:
                    subtotal = add_columns(
                        tl.zeros((ROWS, WIDTH), tl.float32), level_keys, segments, solved, head,
                        tokens, i_start, block_low, block_high, first, scale, shift,
                        HAS_SEGMENTS, ROWS, COLUMNS, KEY_WIDTH, WIDTH, STEP, PRECISION,
                    )  # fmt: skip
                    at = sizes + (head * tl.cdiv(tokens, SUPER) + block) * STEP + channel
                    total += subtotal * tl.load(at)[None, :]
                else:
                    total = add_columns(
                        total, level_keys, segments, solved, head, tokens, i_start,
                        block_low, block_high, first, scale, shift,
                        HAS_SEGMENTS, ROWS, COLUMNS, KEY_WIDTH, WIDTH, STEP, PRECISION,
                    )  # fmt: skip
        else:
            total = add_columns(
                total, keys, segments, solved, head, tokens, i_start, low, high, first,
                scale, shift, HAS_SEGMENTS, ROWS, COLUMNS, KEY_WIDTH, WIDTH, STEP, PRECISION,
            )  # fmt: skip
        own = (part * tl.num_programs(1) + head) * SUPER + i_start - start + tl.arange(0, ROWS)
        tl.store(sums + own[:, None] * STEP + channel[None, :], total)


@triton.jit
def right_sides(
    v, valid, sums, batch, n, head, heads, i_start, start, parts, first, s, width,
    v_b, v_s, v_n, v_e,
    HAS_VALID: tl.constexpr, TILE: tl.constexpr, SUPER: tl.constexpr, WIDTH: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """R_i − P_i of a tile of rows; R is 0 for padding and invalid tokens, which may be NaN."""
    token = i_start + tl.arange(0, TILE).to(tl.int64)
    channel = first + tl.arange(0, WIDTH).to(tl.int64)
    is_valid = token < s
    if HAS_VALID:
        is_valid = is_valid & (tl.load(valid + batch * s + token, mask=is_valid, other=0) != 0)
    mask = is_valid[:, None] & (channel < width)[None, :]
    at = v + batch * v_b + n * v_n + token[:, None] * v_s + channel[None, :] * v_e
    sides = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for part in range(parts):
        sides -= load_rows(
            sums, part * heads + head, SUPER, i_start - start, TILE, WIDTH, first, STEP
        )
    return sides


@triton.jit
def exponents(tile):
    """For each channel, the least power of two that no magnitude in the tile exceeds: its log₂."""
    largest = tl.max(tl.abs(tile), axis=0)
    return tl.ceil(tl.log2(tl.minimum(tl.maximum(largest, 1e-30), 1e38)))


@triton.jit
def substitute(
    matrix,
    inverse,
    factor,
    segments,
    v,
    valid,
    sums,
    solved,
    tile_exponents,
    sizes,
    rho,
    out,
    d_factor,
    s,
    heads,
    tokens,
    start,
    past,
    per_part,
    width,
    v_b,
    v_s,
    v_n,
    v_e,
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
    HAS_VALID: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    SCALED: tl.constexpr,
    TILE: tl.constexpr,
    SUPER: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Solve the super-block at `start` for a block of channels.

    y or dv is written to `out` (b, s, n, e), and, divided by powers of two, to `solved`
    (m, T, STEP) as an operand; the powers are written to `sizes` (m, super-blocks, STEP), and the
    exponents of those of tiles to `tile_exponents` (m, SUPER / TILE, STEP). With β, ρ is written to
    `rho` (b, s, n, e) forward. Backward it is read, and `d_factor` (blocks of channels, m, T) gets
    the part of these channels in dβ = X · ρ.
    """
    head = tl.program_id(1).to(tl.int64)
    b, n = head // heads, head % heads
    first = tl.program_id(0) * WIDTH
    channel = first + tl.arange(0, WIDTH).to(tl.int64)
    end = tl.minimum(start + SUPER, tokens)
    count = (end - start) // TILE
    if HAS_SEGMENTS:
        segments += b * 2 * tokens
    tile_exponents += head * (SUPER // TILE) * STEP + channel
    highest = tl.full((WIDTH,), -120.0, tl.float32)
    for index in range(count):
        i_start = start + index * TILE
        low, high = start, i_start
        if BACKWARD:
            i_start = end - (index + 1) * TILE
            low, high = i_start + TILE, end
        if HAS_SEGMENTS:
            begin_of_rows, end_of_rows = reach(segments, tokens, i_start, TILE)
            low = tl.maximum(low, begin_of_rows // TILE * TILE)
            high = tl.minimum(high, end_of_rows)
        total = tl.zeros((TILE, WIDTH), tl.float32)
        for j_start in range(low, high, TILE):
            column = tl.multiple_of(j_start - start, TILE)
            phi_tile = load_rows(matrix, head, SUPER, i_start - start, TILE, TILE, column, SUPER)
            values = load_rows(solved, head, tokens, j_start, TILE, WIDTH, first, STEP)
            if SCALED:
                power = tl.exp2(tl.load(tile_exponents + (j_start - start) // TILE * STEP))
                total += tl.dot(phi_tile, values) * power[None, :]
            else:
                total += tl.dot(phi_tile, values, input_precision=PRECISION)
        sides = right_sides(
            v, valid, sums, b, n, head, tl.num_programs(1), i_start, start,
            tl.cdiv(past, per_part), first, s, width, v_b, v_s, v_n, v_e,
            HAS_VALID, TILE, SUPER, WIDTH, STEP,
        )  # fmt: skip
        sides -= total
        block = load_rows(inverse, head, tokens, i_start, TILE, TILE, 0, TILE)
        if BACKWARD:
            block = tl.trans(block)
        if SCALED:
            exponent = exponents(sides) - LARGEST
            operand = (sides * tl.exp2(-exponent)[None, :]).to(block.dtype)
            solution = tl.dot(block, operand) * tl.exp2(exponent)[None, :]
        else:
            solution = tl.dot(block, sides, input_precision=PRECISION)
        token = i_start + tl.arange(0, TILE).to(tl.int64)
        row = head * tokens + token
        result = solution * tl.load(factor + row)[:, None]
        at = solved + row[:, None] * STEP + channel[None, :]
        if SCALED:
            exponent = exponents(result) - LARGEST
            highest = tl.maximum(highest, exponent)
            tl.store(tile_exponents + (i_start - start) // TILE * STEP, exponent)
            tl.store(at, (result * tl.exp2(-exponent)[None, :]).to(solved.dtype.element_ty))
        else:
            tl.store(at, result)
        inside = (token < s)[:, None] & (channel < width)[None, :]
        at = out + b * out_b + n * out_n + token[:, None] * out_s + channel[None, :] * out_e
        tl.store(at, result.to(out.dtype.element_ty), mask=inside)
        if HAS_BETA:
            at = rho + b * rho_b + n * rho_n + token[:, None] * rho_s + channel[None, :] * rho_e
            if BACKWARD:
                rho_tile = tl.load(at, mask=inside, other=0.0).to(tl.float32)
                part = d_factor + (tl.program_id(0) * tl.num_programs(1) + head) * tokens
                tl.store(part + token, tl.sum(solution * rho_tile, axis=1))
            else:
                tl.store(at, solution.to(rho.dtype.element_ty), mask=inside)
        # The next tiles read what other threads have stored.
        tl.debug_barrier()

    if SCALED:
        tl.store(
            sizes + (head * tl.cdiv(tokens, SUPER) + start // SUPER) * STEP + channel,
            tl.exp2(highest),
        )
        for index in range(count):
            row = head * tokens + start + index * TILE + tl.arange(0, TILE)
            at = solved + row[:, None] * STEP + channel[None, :]
            less = tl.exp2(tl.load(tile_exponents + index * STEP) - highest)
            values = tl.load(at).to(tl.float32) * less[None, :]
            tl.store(at, values.to(solved.dtype.element_ty))
