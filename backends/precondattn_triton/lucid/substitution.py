"""Block substitution with LUCID's matrix, one super-block after another.

Forward, for the super-blocks J of S tokens from the first to the last, with R = v, and backward,
from the last to the first, with R = dy, two launches each:

    update        P_J = Σ_I Φ_JI y_I  over the super-blocks I solved before;  Φ_JJ is stored
    substitute    for the tiles i of J, in the order of the solve, with N_i of `inverse.py`,

        ρ_i = N_i (R_i − P_i − Σ_j Φ_ij y_j),    y_i = β_i ρ_i,    over the tiles j of J before i.

Backward, N_iᵀ replaces N_i, X replaces ρ and dv replaces y. Φ is symmetric, so that the same
kernels serve both directions. In PaTH's metric the keys of a tile are the rows at the border
between it and the other tile (`borders.py`), and Φ is symmetric again.

`update` recomputes Φ from the keys, and sums over all columns in registers. Super-blocks are in
groups of up to three. The first launch of a group writes P of all its rows, for the columns solved
before the group; each other launch adds to P of its super-block, for the columns solved before
within the group. Grid: per tile of rows and head, one program for Φ_JJ, and one per block of
channels and part of the columns for P. The columns have several parts only where there are too few
tiles of rows for the GPU. Parts are summed in their order.

Backward, `update` may also sum a part of the gradient of the keys of its rows (`gradient.py`),

    Σ_j Φ_ij g_ij k̂_j,    g_ij = dv_j · y_i,

in the same loop. In products of 16 bits, W = Φ g is a factor. So rows of y are multiplied by the
powers of two of dv's channels, and divided by one of their own, for each super-block of columns:
then |g| < 2¹⁵, and channels in which y is large and dv small keep their digits.

`substitute` can not divide the rows of a head between programs, since each needs those before it.
Grid: one program per block of channels and head, each for all rows of J. They read the same Φ_JJ,
which is why it is stored: S² numbers per head, used again for every super-block.

In products of 16 bits, every tile of y is divided by a power of two for each channel, so that no
quotient exceeds 2¹⁴ and the largest exceeds 2¹³. When J is solved, all of its tiles are divided by
the largest of these powers instead. `update` takes the super-blocks in the order in which they were
solved, and multiplies its sums by the quotient of two powers between them. So results that are far
smaller than those of other super-blocks keep their digits. A power is at least 2⁻⁶⁰ times those of
super-blocks solved before, so that sums in its units do not overflow.
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
from precondattn_triton.tiles import load_rows, load_tokens

LARGEST = tl.constexpr(14)
"""The exponent that no quotient in 16 bits exceeds; float16 ends before 2¹⁶."""

RANGE = tl.constexpr(60)
"""The most by which exponents of a super-block are below the largest of those solved before."""


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
def row_units(rows):
    """For each row, a power of two of which the sum of its magnitudes is less than twice."""
    length = tl.sum(tl.abs(rows), axis=1)
    return tl.exp2(tl.floor(tl.log2(tl.minimum(tl.maximum(length, 1e-30), 1e38))))


@triton.jit
def store_in_units(
    y, factor, units, scaled_y, count, width, y_s, y_e,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Store `count` of ROWS rows of y in 16 bits, times a factor of each channel, divided by units.

    A few rows at a time: there are few registers beside the sums. Offsets have 32 bits, which take
    fewer registers than 64.
    """
    PIECE: tl.constexpr = 16 if ROWS > 16 else ROWS
    channel = tl.arange(0, WIDTH)
    for first in range(0, ROWS, PIECE):
        row = first + tl.arange(0, PIECE)
        inside = (row < count)[:, None] & (channel < width)[None, :]
        rows = tl.load(y + row[:, None] * y_s + channel[None, :] * y_e, mask=inside, other=0.0)
        rows = rows.to(tl.float32) * factor[None, :]
        unit = row_units(rows)
        tl.store(units + row, unit)
        rows = (rows * (1.0 / unit)[:, None]).to(scaled_y.dtype.element_ty)
        tl.store(scaled_y + row[:, None] * STEP + channel[None, :], rows)


@triton.jit
def add_columns_and_gradient(
    total, gradient, i_keys, y_rows, keys, segments, solved, head, tokens, i_start, low, high,
    scale, shift,
    HAS_SEGMENTS: tl.constexpr, COLUMNS: tl.constexpr, KEY_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add Φ dv of the columns to `total`, and (Φ ∘ y dvᵀ) k̂ to `gradient`: Φ is computed once."""
    for j_start in range(low, high, COLUMNS):
        j_keys = load_rows(keys, head, tokens, j_start, COLUMNS, KEY_WIDTH, 0, KEY_WIDTH)
        tile = phi(
            i_keys, j_keys, segments, i_start, j_start, scale, shift, HAS_SEGMENTS, PRECISION
        )
        values = load_rows(solved, head, tokens, j_start, COLUMNS, WIDTH, 0, STEP)
        tile = tile.to(values.dtype)
        total += tl.dot(tile, values, input_precision=PRECISION)
        products = tl.dot(y_rows, tl.trans(values), input_precision=PRECISION)
        products *= tile.to(tl.float32)
        gradient += tl.dot(products.to(j_keys.dtype), j_keys, input_precision=PRECISION)
    return total, gradient


@triton.jit
def scaled_sums_and_gradient(
    y, y_units, scaled_y, keys, segments, solved, sizes, ratios, head, row, tokens, i_start,
    low, high, count, width, y_s, y_e, scale, shift,
    HAS_SEGMENTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SUPER: tl.constexpr,
    KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Φ dv and (Φ ∘ y dvᵀ) k̂ of a tile of rows, backward, with factors of 16 bits.

    `row` is its first row in `scaled_y` and `y_units`; `sizes` and `ratios` are those of the head.
    """
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    gradient = tl.zeros((ROWS, KEY_WIDTH), tl.float32)
    y_units += row
    own_y_units = y_units + tl.arange(0, ROWS)
    i_keys = load_rows(keys, head, tokens, i_start, ROWS, KEY_WIDTH, 0, KEY_WIDTH)
    first_block, last_block = low // SUPER, tl.cdiv(high, SUPER) - 1
    unit = 1.0
    # Blocks in the order in which they were solved: the last ones first.
    for index in range(0, last_block + 1 - first_block):
        block = last_block - index
        size = tl.load(sizes + block * STEP)
        next_unit = tl.max(size, axis=0)
        # Every thread has read rows and units of the block before.
        units_before = tl.load(own_y_units, mask=index > 0, other=0.0)
        tl.debug_barrier()
        store_in_units(
            y, size * (1.0 / next_unit), y_units, scaled_y + row * STEP,
            count, width, y_s, y_e, ROWS, WIDTH, STEP,
        )  # fmt: skip
        tl.debug_barrier()
        # Sums are scaled before the first block too, where they are 0: ptxas runs all products of a
        # kernel one after another if an accumulator is scaled behind a branch.
        total *= tl.load(ratios + block * STEP)[None, :]
        gradient *= (units_before / tl.load(own_y_units) * (unit / next_unit))[:, None]
        unit = next_unit
        # An operand that is loaded stays in shared memory, not in registers.
        operand = load_rows(scaled_y, 0, 0, row, ROWS, WIDTH, 0, STEP)
        total, gradient = add_columns_and_gradient(
            total, gradient, i_keys, operand, keys, segments, solved, head, tokens, i_start,
            tl.maximum(low, block * SUPER), tl.minimum(high, (block + 1) * SUPER), scale, shift,
            HAS_SEGMENTS, COLUMNS, KEY_WIDTH, WIDTH, STEP, PRECISION,
        )  # fmt: skip
    if first_block <= last_block:
        total *= tl.load(sizes + first_block * STEP)[None, :]
        gradient *= tl.load(own_y_units)[:, None] * unit
    return total, gradient


@triton.jit
def update(
    keys,
    chunk_scores,
    segments,
    solved,
    sizes,
    ratios,
    sums,
    matrix,
    y,
    y_units,
    scaled_y,
    key_sums,
    s,
    width,
    heads,
    tokens,
    start,
    group,
    first_row,
    first_column,
    last_column,
    per_part,
    parts_before,
    keys_of_level,
    scale,
    shift,
    y_b,
    y_s,
    y_n,
    y_e,
    BACKWARD: tl.constexpr,
    HAS_BORDERS: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    SCALED: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    SUPER: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """P of rows of a group, or Φ of its super-block at `start`, for a tile of rows.

    The first program of a tile in the super-block writes Φ to `matrix` (m, SUPER, SUPER): columns
    before the rows, or, backward, after them. Each of the others computes P for a block of channels
    and a part of the columns `first_column` … `last_column`, `per_part` of them, and writes it to
    `sums` (parts, m, GROUP_ROWS, STEP), whose rows are those of the group at `group`, or adds it to
    one of the `parts_before`. With borders, `keys` (levels, m, T, KEY_WIDTH) have `keys_of_level`
    elements for each level. `sizes` and `ratios` are those of `substitute`.

    WITH_GRADIENT, Σ_j Φ_ij g_ij k̂_j is summed as P is, in `key_sums` (parts, m, T, KEY_WIDTH), from
    y (b, s, n, width). `scaled_y` (parts, m, GROUP_ROWS, STEP) and `y_units` (parts, m, GROUP_ROWS)
    are workspace if SCALED.
    """
    head = tl.program_id(1).to(tl.int64)
    if HAS_SEGMENTS:
        segments += head // heads * 2 * tokens
    i_start = first_row + tl.program_id(0) * ROWS
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
        if (i_start >= start) & (i_start < end):
            for row in range(0, ROWS, SIDE):
                row_start = i_start + row
                # Tiles on the diagonal are those of `inverse.py`.
                if BACKWARD:
                    low = (row_start // TILE + 1) * TILE // COLUMNS * COLUMNS
                    high = tl.minimum(end, end_of_rows)
                else:
                    low = tl.maximum(start, begin_of_rows)
                    high = (row_start + SIDE - 1) // TILE * TILE
                store_tiles(
                    keys, chunk_scores, segments, matrix, head, tokens, row_start, low, high, start,
                    keys_of_level, scale, shift, BACKWARD, HAS_BORDERS, HAS_SEGMENTS, SIDE, COLUMNS,
                    SUPER, CHUNK, KEY_WIDTH, PRECISION,
                )  # fmt: skip
    else:
        CHANNELS: tl.constexpr = STEP // WIDTH
        first = (tl.program_id(2) - 1) % CHANNELS * WIDTH
        part = (tl.program_id(2) - 1) // CHANNELS
        low = first_column + part * per_part
        high = tl.minimum(low + per_part, last_column)
        low, high = tl.maximum(low, begin_of_rows), tl.minimum(high, end_of_rows)
        channel = first + tl.arange(0, WIDTH)
        offset = (part * tl.num_programs(1) + head) * GROUP_ROWS + i_start - group
        own_sums = sums + offset * STEP + tl.arange(0, ROWS)[:, None] * STEP + channel[None, :]
        offset = head * tl.cdiv(tokens, SUPER) * STEP
        own_sizes, own_ratios = sizes + offset + channel, ratios + offset + channel
        has_sums = part < parts_before
        if WITH_GRADIENT:
            of_part = part * tl.num_programs(1) + head
            own_key_sums = key_sums + (of_part * tokens + i_start) * KEY_WIDTH
            own_key_sums += tl.arange(0, ROWS)[:, None] * KEY_WIDTH
            own_key_sums += tl.arange(0, KEY_WIDTH)[None, :]
            y += head // heads * y_b + head % heads * y_n + i_start.to(tl.int64) * y_s
        if WITH_GRADIENT and SCALED:
            total, gradient = scaled_sums_and_gradient(
                y, y_units, scaled_y, keys, segments, solved, own_sizes, own_ratios, head,
                of_part * GROUP_ROWS + i_start - group, tokens, i_start, low, high, s - i_start,
                width, y_s, y_e, scale, shift,
                HAS_SEGMENTS, ROWS, COLUMNS, SUPER, KEY_WIDTH, WIDTH, STEP, PRECISION,
            )  # fmt: skip
        elif WITH_GRADIENT:
            total = tl.zeros((ROWS, WIDTH), tl.float32)
            gradient = tl.zeros((ROWS, KEY_WIDTH), tl.float32)
            i_keys = load_rows(keys, head, tokens, i_start, ROWS, KEY_WIDTH, 0, KEY_WIDTH)
            y_rows = load_tokens(y, 0, 0, s - i_start, width, y_s, y_e, ROWS, WIDTH)
            total, gradient = add_columns_and_gradient(
                total, gradient, i_keys, y_rows.to(tl.float32), keys, segments, solved, head,
                tokens, i_start, low, high, scale, shift,
                HAS_SEGMENTS, COLUMNS, KEY_WIDTH, WIDTH, STEP, PRECISION,
            )  # fmt: skip
        elif SCALED or HAS_BORDERS:
            total = tl.zeros((ROWS, WIDTH), tl.float32)
            first_block, last_block = low // SUPER, tl.cdiv(high, SUPER) - 1
            for index in range(0, last_block + 1 - first_block):
                # Blocks in the order in which they were solved.
                block = last_block - index if BACKWARD else first_block + index
                level_keys = keys
                if HAS_BORDERS:
                    level = highest_difference(i_start // CHUNK, block * SUPER // CHUNK)
                    level_keys = keys + level * keys_of_level
                if SCALED:
                    total *= tl.load(own_ratios + block * STEP)[None, :]
                total = add_columns(
                    total, level_keys, segments, solved, head, tokens, i_start,
                    tl.maximum(low, block * SUPER), tl.minimum(high, (block + 1) * SUPER),
                    first, scale, shift,
                    HAS_SEGMENTS, ROWS, COLUMNS, KEY_WIDTH, WIDTH, STEP, PRECISION,
                )  # fmt: skip
            if SCALED and first_block <= last_block:
                last_solved = first_block if BACKWARD else last_block
                total *= tl.load(own_sizes + last_solved * STEP)[None, :]
        else:
            total = tl.zeros((ROWS, WIDTH), tl.float32)
            total = add_columns(
                total, keys, segments, solved, head, tokens, i_start, low, high, first,
                scale, shift, HAS_SEGMENTS, ROWS, COLUMNS, KEY_WIDTH, WIDTH, STEP, PRECISION,
            )  # fmt: skip
        if has_sums:
            total += tl.load(own_sums)
            if WITH_GRADIENT:
                gradient += tl.load(own_key_sums)
            # No thread may write sums that another thread has not read yet.
            tl.debug_barrier()
        tl.store(own_sums, total)
        if WITH_GRADIENT:
            tl.store(own_key_sums, gradient)


@triton.jit
def right_sides(
    v, valid, sums, batch, n, head, heads, i_start, group, parts, first, s, cached, width,
    v_b, v_s, v_n, v_e,
    HAS_VALID: tl.constexpr, TILE: tl.constexpr, GROUP_ROWS: tl.constexpr, WIDTH: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """R_i − P_i of a tile of rows; R is 0 for padding and invalid tokens, which may be NaN."""
    token = i_start + tl.arange(0, TILE).to(tl.int64)
    channel = first + tl.arange(0, WIDTH).to(tl.int64)
    is_valid = token < s
    if HAS_VALID:
        is_valid = is_valid & (tl.load(valid + batch * s + token, mask=is_valid, other=0) != 0)
    mask = is_valid[:, None] & (channel < width)[None, :]
    at = v + batch * v_b + n * v_n + (token - cached)[:, None] * v_s + channel[None, :] * v_e
    sides = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for part in range(parts):
        sides -= load_rows(
            sums, part * heads + head, GROUP_ROWS, i_start - group, TILE, WIDTH, first, STEP
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
    ratios,
    rho,
    out,
    d_factor,
    s,
    heads,
    tokens,
    start,
    group,
    parts,
    cached,
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
    GROUP_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Solve the super-block at `start` for a block of channels.

    v, `out` and `rho` begin at token `cached`.

    y or dv is written to `out` (b, s, n, e), and, divided by powers of two, to `solved`
    (m, T, STEP) as an operand. The powers are written to `sizes` (m, super-blocks, STEP), those of
    the super-block before divided by them to `ratios`, and the exponents of those of tiles to
    `tile_exponents` (m, SUPER / TILE, STEP). With β, ρ is written to `rho` (b, s, n, e) forward.
    Backward it is read, and `d_factor` (blocks of channels, m, T) gets the part of these channels
    in dβ = X · ρ.
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
    largest_before, last_before = highest, highest
    sizes += head * tl.cdiv(tokens, SUPER) * STEP + channel
    if SCALED:
        first_solved, solved_blocks = 0, start // SUPER
        if BACKWARD:
            first_solved = start // SUPER + 1
            solved_blocks = tl.cdiv(tokens, SUPER) - first_solved
        for index in range(solved_blocks):
            # The loop visits super-blocks in the order in which they were solved.
            block = first_solved + (solved_blocks - 1 - index if BACKWARD else index)
            last_before = tl.log2(tl.load(sizes + block * STEP))
            largest_before = tl.maximum(largest_before, last_before)
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
            v, valid, sums, b, n, head, tl.num_programs(1), i_start, group,
            parts, first, s, cached, width, v_b, v_s, v_n, v_e,
            HAS_VALID, TILE, GROUP_ROWS, WIDTH, STEP,
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
        new_token = (token - cached)[:, None]
        at = out + b * out_b + n * out_n + new_token * out_s + channel[None, :] * out_e
        tl.store(at, result.to(out.dtype.element_ty), mask=inside)
        if HAS_BETA:
            at = rho + b * rho_b + n * rho_n + new_token * rho_s + channel[None, :] * rho_e
            if BACKWARD:
                rho_tile = tl.load(at, mask=inside, other=0.0).to(tl.float32)
                part = d_factor + (tl.program_id(0) * tl.num_programs(1) + head) * tokens
                tl.store(part + token, tl.sum(solution * rho_tile, axis=1))
            else:
                tl.store(at, solution.to(rho.dtype.element_ty), mask=inside)
        # The next tiles read what other threads have stored.
        tl.debug_barrier()

    if SCALED:
        highest = tl.maximum(highest, largest_before - RANGE)
        block = start // SUPER * STEP
        tl.store(sizes + block, tl.exp2(highest))
        ratios += head * tl.cdiv(tokens, SUPER) * STEP + channel
        tl.store(ratios + block, tl.exp2(last_before - highest))
        for index in range(count):
            row = head * tokens + start + index * TILE + tl.arange(0, TILE)
            at = solved + row[:, None] * STEP + channel[None, :]
            less = tl.exp2(tl.load(tile_exponents + index * STEP) - highest)
            values = tl.load(at).to(tl.float32) * less[None, :]
            tl.store(at, values.to(solved.dtype.element_ty))
