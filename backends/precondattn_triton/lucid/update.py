"""The first launch of a super-block (`substitution.py`): products with y that was solved before.

    P_J = Σ_I Φ_JI y_I  over the super-blocks I solved before;  Φ_JJ is stored

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
from precondattn_triton.tiles import load_rows, load_tokens, start_of


@triton.jit
def store_tiles(
    keys, chunk_scores, segments, matrix, head, tokens, i_start, low, high, start,
    keys_of_level, scale, shift, BACKWARD: tl.constexpr, HAS_BORDERS: tl.constexpr,
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
                tile = weights(scores, segments, i_start, j_start, scale, shift)
                tl.store(at + j_start, tile.to(matrix.dtype.element_ty))
    else:
        i_keys = load_rows(keys, head, tokens, i_start, ROWS, KEY_WIDTH, 0, KEY_WIDTH)
        for j_start in range(low, high, COLUMNS):
            j_keys = load_rows(keys, head, tokens, j_start, COLUMNS, KEY_WIDTH, 0, KEY_WIDTH)
            tile = phi(i_keys, j_keys, segments, i_start, j_start, scale, shift, PRECISION)
            tl.store(at + j_start, tile.to(matrix.dtype.element_ty))


@triton.jit
def add_columns(
    total, keys, segments, solved, head, tokens, i_start, low, high, first, scale, shift,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr,
    STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add Φ y of the columns from `low` to `high` to `total`, for a tile of rows."""
    i_keys = load_rows(keys, head, tokens, i_start, ROWS, KEY_WIDTH, 0, KEY_WIDTH)
    for j_start in range(low, high, COLUMNS):
        j_keys = load_rows(keys, head, tokens, j_start, COLUMNS, KEY_WIDTH, 0, KEY_WIDTH)
        tile = phi(i_keys, j_keys, segments, i_start, j_start, scale, shift, PRECISION)
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
    y, start, factor, units, scaled_y, count, width,
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
        at = start + row[:, None] * y.token + channel[None, :] * y.channel
        rows = tl.load(at, mask=inside, other=0.0).to(tl.float32) * factor[None, :]
        unit = row_units(rows)
        tl.store(units + row, unit)
        rows = (rows * (1.0 / unit)[:, None]).to(scaled_y.dtype.element_ty)
        tl.store(scaled_y + row[:, None] * STEP + channel[None, :], rows)


@triton.jit
def add_columns_and_gradient(
    total, gradient, i_keys, y_rows, keys, segments, solved, head, tokens, i_start, low, high,
    scale, shift, COLUMNS: tl.constexpr, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr,
    STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add Φ dv of the columns to `total`, and (Φ ∘ y dvᵀ) k̂ to `gradient`: Φ is computed once."""
    for j_start in range(low, high, COLUMNS):
        j_keys = load_rows(keys, head, tokens, j_start, COLUMNS, KEY_WIDTH, 0, KEY_WIDTH)
        tile = phi(i_keys, j_keys, segments, i_start, j_start, scale, shift, PRECISION)
        values = load_rows(solved, head, tokens, j_start, COLUMNS, WIDTH, 0, STEP)
        tile = tile.to(values.dtype)
        total += tl.dot(tile, values, input_precision=PRECISION)
        products = tl.dot(y_rows, tl.trans(values), input_precision=PRECISION)
        products *= tile.to(tl.float32)
        gradient += tl.dot(products.to(j_keys.dtype), j_keys, input_precision=PRECISION)
    return total, gradient


@triton.jit
def scaled_sums_and_gradient(
    y, y_start, y_units, scaled_y, keys, segments, solved, sizes, ratios, head, row, tokens,
    i_start, low, high, count, width, scale, shift,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SUPER: tl.constexpr, KEY_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
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
            y, y_start, size * (1.0 / next_unit), y_units, scaled_y + row * STEP, count, width,
            ROWS, WIDTH, STEP,
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
            COLUMNS, KEY_WIDTH, WIDTH, STEP, PRECISION,
        )  # fmt: skip
    if first_block <= last_block:
        total *= tl.load(sizes + first_block * STEP)[None, :]
        gradient *= tl.load(own_y_units)[:, None] * unit
    return total, gradient


@triton.jit
def update(
    keys, chunk_scores, segments, solved, sizes, ratios, sums, matrix, y, y_units, scaled_y,
    key_sums, s, width, heads, tokens, start, group, first_row, first_column, last_column,
    per_part, parts_before, keys_of_level, scale, shift,
    BACKWARD: tl.constexpr, HAS_BORDERS: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, SUPER: tl.constexpr,
    GROUP_ROWS: tl.constexpr, CHUNK: tl.constexpr, KEY_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P of rows of a group, or Φ of its super-block at `start`, for a tile of rows.

    The first program of a tile in the super-block writes Φ to `matrix` (m, SUPER, SUPER): columns
    before the rows, or, backward, after them. Each of the others computes P for a block of channels
    and a part of the columns `first_column` … `last_column`, `per_part` of them, and writes it to
    `sums` (parts, m, GROUP_ROWS, STEP), whose rows are those of the group at `group`, or adds it to
    one of the `parts_before`. With borders, `keys` (levels, m, T, KEY_WIDTH) have `keys_of_level`
    elements for each level. `sizes` and `ratios` are those of `substitute`.

    If `key_sums` (parts, m, T, KEY_WIDTH) is not None, Σ_j Φ_ij g_ij k̂_j is summed in it, as P is,
    from y (b, s, n, width). `scaled_y` (parts, m, GROUP_ROWS, STEP) and `y_units` (parts, m,
    GROUP_ROWS) are workspace if SCALED.
    """
    head = tl.program_id(1).to(tl.int64)
    if segments is not None:
        segments += head // heads * 2 * tokens
    i_start = first_row + tl.program_id(0) * ROWS
    end = tl.minimum(start + SUPER, tokens)
    # Columns of the same segments, of this tile of rows and of those that are substituted together.
    UNIT: tl.constexpr = TILE if TILE > ROWS else ROWS
    WIDER: tl.constexpr = TILE if TILE > COLUMNS else COLUMNS
    begin_of_rows, end_of_rows = 0, tokens
    if segments is not None:
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
                    keys_of_level, scale, shift, BACKWARD, HAS_BORDERS, SIDE, COLUMNS, SUPER, CHUNK,
                    KEY_WIDTH, PRECISION,
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
        if key_sums is not None:
            of_part = part * tl.num_programs(1) + head
            own_key_sums = key_sums + (of_part * tokens + i_start) * KEY_WIDTH
            own_key_sums += tl.arange(0, ROWS)[:, None] * KEY_WIDTH
            own_key_sums += tl.arange(0, KEY_WIDTH)[None, :]
            y_start = start_of(y, head // heads, head % heads) + i_start.to(tl.int64) * y.token
        if key_sums is not None and SCALED:
            total, gradient = scaled_sums_and_gradient(
                y, y_start, y_units, scaled_y, keys, segments, solved, own_sizes, own_ratios, head,
                of_part * GROUP_ROWS + i_start - group, tokens, i_start, low, high, s - i_start,
                width, scale, shift, ROWS, COLUMNS, SUPER, KEY_WIDTH, WIDTH, STEP, PRECISION,
            )  # fmt: skip
        elif key_sums is not None:
            total = tl.zeros((ROWS, WIDTH), tl.float32)
            gradient = tl.zeros((ROWS, KEY_WIDTH), tl.float32)
            i_keys = load_rows(keys, head, tokens, i_start, ROWS, KEY_WIDTH, 0, KEY_WIDTH)
            y_rows = load_tokens(y_start, 0, 0, s - i_start, width, y.token, y.channel, ROWS, WIDTH)
            total, gradient = add_columns_and_gradient(
                total, gradient, i_keys, y_rows.to(tl.float32), keys, segments, solved, head,
                tokens, i_start, low, high, scale, shift, COLUMNS, KEY_WIDTH, WIDTH, STEP,
                PRECISION,
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
                    first, scale, shift, ROWS, COLUMNS, KEY_WIDTH, WIDTH, STEP, PRECISION,
                )  # fmt: skip
            if SCALED and first_block <= last_block:
                last_solved = first_block if BACKWARD else last_block
                total *= tl.load(own_sizes + last_solved * STEP)[None, :]
        else:
            total = tl.zeros((ROWS, WIDTH), tl.float32)
            total = add_columns(
                total, keys, segments, solved, head, tokens, i_start, low, high, first,
                scale, shift, ROWS, COLUMNS, KEY_WIDTH, WIDTH, STEP, PRECISION,
            )  # fmt: skip
        if has_sums:
            total += tl.load(own_sums)
            if key_sums is not None:
                gradient += tl.load(own_key_sums)
            # No thread may write sums that another thread has not read yet.
            tl.debug_barrier()
        tl.store(own_sums, total)
        if key_sums is not None:
            tl.store(own_key_sums, gradient)
