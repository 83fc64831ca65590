"""PaTH backward: queries as they enter each chunk or block, and their gradients.

For x_c, the query as it enters chunk c of its block (`chunks.py`), or block c (`blocks.py`), and
y_c, the gradient of the query as it leaves it,

    carry             X[c] = x_c,    x_{c−1} = x_c P_c                c = last … first
    query gradient    Y[c] = y_c,    y_{c+1} = y_c P_cᵀ + dS_c K_cᵀ   c = first … last

with dS = s A ∘ (do vᵀ − D), where A = e^{s x Kᵀ − λ} is recomputed. For chunks, x P is x − (x wᵀ) U
and K is K̃; for blocks x P is x + x C and K is K̂. A query passes the chunks before it in its own
block, and then the blocks; its gradient the blocks, and then the chunks. The last y is the gradient
of the query as it leaves its own chunk (`within_chunk.py`). y needs the x in reverse order, and x
cannot be recomputed backward, since reflections may be projections and have no inverse. So X is
stored, and Y too, for the gradient of the reflections: for a group of queries at a time
(`groups.py`), one row of width D for each query and chunk or block.

Products per head, in units of t² / 2: `carry` d² / S, `query_gradient` d² / S + 2 d + e; those of
chunks, in units of t S / 2: 2 d and 4 d + e. Grid: one program per tile of queries, head and
sequence, for each group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.path.blocks import matrix_of
from precondattn_triton.path.chunks import rows_of
from precondattn_triton.path.forward import first_key
from precondattn_triton.path.groups import stored_row
from precondattn_triton.softmax.score_tiles import add_product, load_logs
from precondattn_triton.tiles import (
    LOG2_E,
    is_token,
    load_channels,
    load_tile,
    start_of,
    store_channels,
    tile_of_program,
)


@triton.jit
def carry(
    q, w, u, corrections, x_out, masks, window, group, sizes, size, tokens, blocks,
    D: tl.constexpr, PADDED_D: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    t, s, h, n, end = sizes.t, sizes.s, sizes.h, sizes.n, group.end
    tile, batch, head = tile_of_program(tl.cdiv(end - group.start, ROWS), h)
    kv_index = batch * n + head // (h // n)
    first = group.start + tile * ROWS
    position = first + tl.arange(0, ROWS)
    rows = position - (s - t)
    is_present = (rows >= 0) & (rows < t) & (position < end)
    is_row = is_present & is_token(masks.q_valid, batch, tl.maximum(rows, 0), t)
    x = load_channels(q, start_of(q, batch, head), rows, is_row, D, PADDED_D).to(tl.float32)
    FACTOR: tl.constexpr = w.dtype.element_ty
    x_out += (batch * h + head) * group.stored * PADDED_D
    local = stored_row(position, group)
    begin = first_key(tl.maximum(first, s - t), batch, s, masks, window)
    of_block = first // size * size
    last_chunk = (tl.minimum(first + ROWS, end) - 1) // CHUNK
    # Chunks that carry queries to the chunks, or to the blocks, that they enter.
    first_chunk = tl.maximum(begin, of_block) // CHUNK
    if corrections is None:
        first_chunk += 1
    else:
        first_chunk = tl.where(begin < of_block, first_chunk, last_chunk + 1)
    for back in range(0, last_chunk - first_chunk + 1):
        chunk = last_chunk - back
        factor = x.to(FACTOR)
        w_tile = rows_of(w, kv_index, tokens, chunk * CHUNK, CHUNK, PADDED_D)
        b = tl.dot(factor, tl.trans(w_tile), input_precision=PRECISION)
        columns = chunk * CHUNK + tl.arange(0, CHUNK)
        b = tl.where(columns[None, :] <= position[:, None], b, 0.0)
        u_tile = rows_of(u, kv_index, tokens, chunk * CHUNK, CHUNK, PADDED_D)
        x -= tl.dot(b.to(FACTOR), u_tile, input_precision=PRECISION)
        if corrections is None:
            is_after = is_present & (position >= chunk * CHUNK)
            other = (chunk - 1) % group.per_parent * CHUNK
            store_channels(x_out, local + other, is_after, PADDED_D, x, PADDED_D)
    if corrections is not None:
        for back in range(0, of_block // size - begin // size):
            block = of_block // size - 1 - back
            factor = x.to(FACTOR)
            store_channels(x_out, local + block * size, is_present, PADDED_D, factor, PADDED_D)
            correction = matrix_of(corrections, kv_index * blocks + block, PADDED_D)
            x = tl.dot(factor, correction, x, input_precision=PRECISION)


@triton.jit
def weights_of(
    x, keys, logs, mask, scale, PRECISION: tl.constexpr, IS_MASKED: tl.constexpr
):  # fmt: skip
    """A of a tile of queries and keys; λ in units of log 2."""
    scores = tl.dot(x, tl.trans(keys), input_precision=PRECISION) * (scale * LOG2_E)
    if IS_MASKED:
        scores = tl.where(mask, scores, float("-inf"))
    return tl.exp2(scores - logs[:, None])


@triton.jit
def query_gradient(
    x_in, v, w, keys, u, corrections, d_out, log_total, d_sum, y_out, chunk_y,
    masks, window, group, sizes, size, tokens, blocks,
    HAS_BLOCKS: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_E: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, TWO_PARTS: tl.constexpr,
):  # fmt: skip
    t, s, h, n, scale, end = sizes.t, sizes.s, sizes.h, sizes.n, sizes.scale, group.end
    tile, batch, head = tile_of_program(tl.cdiv(end - group.start, ROWS), h)
    kv = head // (h // n)
    kv_index = batch * n + kv
    first = group.start + tile * ROWS
    position = first + tl.arange(0, ROWS)
    rows = position - (s - t)
    is_present = (rows >= 0) & (rows < t) & (position < end)
    is_row = is_present & is_token(masks.q_valid, batch, tl.maximum(rows, 0), t)
    at = (batch * h + head) * t
    logs = load_logs(log_total, at, rows, is_row)
    is_row = is_row & (logs < float("inf"))
    sums = tl.load(d_sum + at + rows, mask=is_row, other=0.0)
    FACTOR: tl.constexpr = keys.dtype.element_ty
    IS_MASKED: tl.constexpr = (
        window is not None or masks.k_valid is not None or masks.segment is not None
    )
    g_start, v_start = start_of(d_out, batch, head), start_of(v, batch, kv)
    x_in += (batch * h + head) * group.stored * PADDED_D
    y_out += (batch * h + head) * group.stored * PADDED_D
    chunk_y += at * PADDED_D
    local = stored_row(position, group)

    first_keys = first_key(tl.minimum(tl.maximum(position, 0), s - 1), batch, s, masks, window)
    begin = first_key(tl.maximum(first, s - t), batch, s, masks, window)
    of_block = first // size * size
    if corrections is not None:
        y = tl.zeros((ROWS, PADDED_D), tl.float32)
        for block in range(begin // size, of_block // size):
            # X is stored for blocks that a query reaches.
            reaches = is_row & (first_keys < (block + 1) * size)
            factor = y.to(FACTOR)
            store_channels(y_out, local + block * size, is_present, PADDED_D, factor, PADDED_D)
            correction = matrix_of(corrections, kv_index * blocks + block, PADDED_D)
            y = tl.dot(factor, tl.trans(correction), y, input_precision=PRECISION)
            x = load_tile(x_in, local + block * size, reaches, PADDED_D, PADDED_D, PADDED_D)
            first_column = tl.maximum(begin, block * size) // COLUMNS * COLUMNS
            for column in range(first_column, (block + 1) * size, COLUMNS):
                columns = column + tl.arange(0, COLUMNS)
                is_key = is_token(masks.k_valid, batch, columns, s)
                carried = rows_of(keys, kv_index, blocks * size, column, COLUMNS, PADDED_D)
                mask = is_key[None, :] & (columns[None, :] >= first_keys[:, None])
                a = weights_of(x, carried, logs, mask, scale, PRECISION, IS_MASKED)
                # Loaded in every iteration, which costs fewer registers than keeping it.
                d_o = load_channels(d_out, g_start, rows, is_row, E, PADDED_E).to(FACTOR)
                values = load_channels(v, v_start, columns, is_key, E, PADDED_E).to(FACTOR)
                d_a = tl.dot(d_o, tl.trans(values), input_precision=PRECISION)
                d_scores = a * (d_a - sums[:, None]) * scale
                y = add_product(d_scores, carried, y, PRECISION, TWO_PARTS)
    else:
        y = tl.zeros((ROWS, PADDED_D), tl.float32)
        if HAS_BLOCKS:
            has_y = is_present & (position >= size)
            y = load_tile(chunk_y, rows, has_y, PADDED_D, PADDED_D, PADDED_D)
        last = (tl.minimum(first + ROWS, end) - 1) // CHUNK
        for chunk in range(tl.maximum(begin, of_block) // CHUNK, last):
            column = chunk * CHUNK
            columns = column + tl.arange(0, CHUNK)
            is_key = is_token(masks.k_valid, batch, columns, s)
            is_after = is_present & (position >= column + CHUNK)
            reaches = is_row & is_after & (first_keys < column + CHUNK)
            stored_at = local + chunk % group.per_parent * CHUNK
            factor = y.to(FACTOR)
            store_channels(y_out, stored_at, is_after, PADDED_D, factor, PADDED_D)
            u_tile = rows_of(u, kv_index, tokens, column, CHUNK, PADDED_D)
            d_b = tl.dot(factor, tl.trans(u_tile), input_precision=PRECISION)
            d_b = tl.where(is_after[:, None], d_b, 0.0).to(FACTOR)
            w_tile = rows_of(w, kv_index, tokens, column, CHUNK, PADDED_D)
            y = tl.dot(-d_b, w_tile, y, input_precision=PRECISION)
            values = load_channels(v, v_start, columns, is_key, E, PADDED_E).to(FACTOR)
            d_o = load_channels(d_out, g_start, rows, reaches, E, PADDED_E).to(FACTOR)
            d_a = tl.dot(d_o, tl.trans(values), input_precision=PRECISION)
            x = load_tile(x_in, stored_at, reaches, PADDED_D, PADDED_D, PADDED_D)
            carried = rows_of(keys, kv_index, tokens, column, CHUNK, PADDED_D)
            mask = is_key[None, :] & (columns[None, :] >= first_keys[:, None])
            a = weights_of(x, carried, logs, mask, scale, PRECISION, IS_MASKED)
            d_scores = a * (d_a - sums[:, None]) * scale
            d_scores = tl.where(reaches[:, None], d_scores, 0.0)
            # Loaded again, which costs fewer registers than keeping it.
            carried = rows_of(keys, kv_index, tokens, column, CHUNK, PADDED_D)
            y = add_product(d_scores, carried, y, PRECISION, TWO_PARTS)
    store_channels(chunk_y, rows, is_present, PADDED_D, y, PADDED_D)
