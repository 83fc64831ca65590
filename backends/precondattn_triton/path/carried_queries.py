"""PaTH backward: queries as they enter each chunk, and their gradients.

For a group of queries, let x_c be the query as it enters chunk c, which precedes the query's own
chunk (`chunks.py`), x_{c−1} = x_c − (x_c wᵀ) U, and y_c the gradient of x_{c−1}:

    carry             X[c] = x_c                                          c = last … first
    query gradient    Y[c] = y_c,   y_{c+1} = y_c − (y_c Uᵀ) w + dS_c K̃   c = first … last

with dS = s A ∘ (do vᵀ − D), where A = e^{s x K̃ᵀ − λ} is recomputed. The last y is the gradient of
the query as it leaves its own chunk (`within_chunk.py`). y needs the x in reverse order, and x
cannot be recomputed backward, since reflections may be projections and have no inverse. So X is
stored, for a group of a few chunks of queries at a time, and Y too, for the gradient of the
reflections. Both are (b, h, chunks, rows of the group, D).

Products per head, in units of t² / 2: carry 2 d; query gradient 4 d + e.
Grid: one program per tile of queries, head and sequence, for each group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.path.chunks import rows_of
from precondattn_triton.path.forward import path_may_attend
from precondattn_triton.softmax.score_tiles import add_product, load_logs
from precondattn_triton.tiles import (
    LOG2_E,
    is_token,
    keys_met,
    load_tile,
    store_tile,
    tile_of_program,
)


@triton.jit
def carry(
    q, w, u, x_out, q_valid, segment,
    group_start, group_end, group_rows, t, s, h, n, tokens, chunks,
    q_batch, q_token, q_head, q_channel,
    D: tl.constexpr, PADDED_D: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, batch, head = tile_of_program(tl.cdiv(group_rows, ROWS), h)
    kv_index = batch * n + head // (h // n)
    local = tile * ROWS + tl.arange(0, ROWS)
    rows = group_start + local
    is_row = is_token(q_valid, batch, rows, t) & (rows < group_end)
    x = load_tile(
        q + batch * q_batch + head * q_head, rows, is_row, q_token, q_channel, D, PADDED_D
    ).to(tl.float32)
    FACTOR: tl.constexpr = w.dtype.element_ty
    base = (batch * h + head) * chunks
    position = rows + (s - t)
    first = group_start + tile * ROWS + (s - t)
    end = tl.cdiv(tl.minimum(first + ROWS, group_end + (s - t)), CHUNK)
    begin, _ = keys_met(group_start + tile * ROWS, ROWS, batch, t, s, segment, True)
    for back in range(0, end - begin // CHUNK):
        chunk = end - 1 - back
        start = chunk * CHUNK
        factor = x.to(FACTOR)
        store_tile(
            x_out + (base + chunk) * group_rows * PADDED_D,
            local, local < group_rows, PADDED_D, factor, PADDED_D,
        )  # fmt: skip
        w_tile = rows_of(w, kv_index, tokens, start, CHUNK, PADDED_D)
        b = tl.dot(factor, tl.trans(w_tile), input_precision=PRECISION)
        columns = start + tl.arange(0, CHUNK)
        b = tl.where(columns[None, :] <= position[:, None], b, 0.0)
        u_tile = rows_of(u, kv_index, tokens, start, CHUNK, PADDED_D)
        x -= tl.dot(b.to(FACTOR), u_tile, input_precision=PRECISION)


@triton.jit
def query_gradient(
    x_in, v, w, keys, u, d_out, log_total, d_sum, y_out, chunk_y,
    q_valid, k_valid, segment,
    scale, window, group_start, group_end, group_rows, t, s, h, n, tokens, chunks,
    v_batch, v_token, v_head, v_channel, g_batch, g_token, g_head, g_channel,
    HAS_WINDOW: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, TWO_PARTS: tl.constexpr,
):  # fmt: skip
    tile, batch, head = tile_of_program(tl.cdiv(group_end - group_start, ROWS), h)
    kv = head // (h // n)
    kv_index = batch * n + kv
    local = tile * ROWS + tl.arange(0, ROWS)
    rows = group_start + local
    is_row = is_token(q_valid, batch, rows, t) & (rows < group_end)
    at = (batch * h + head) * t
    logs = load_logs(log_total, at, rows, is_row)
    is_row = is_row & (logs < float("inf"))
    sums = tl.load(d_sum + at + rows, mask=is_row, other=0.0)
    FACTOR: tl.constexpr = keys.dtype.element_ty
    d_out += batch * g_batch + head * g_head
    v += batch * v_batch + kv * v_head
    base = (batch * h + head) * chunks

    y = tl.zeros((ROWS, PADDED_D), tl.float32)
    position = rows + (s - t)
    if segment is not None:
        segment_begin = tl.load(segment + batch * 2 * s + position, mask=rows < t, other=s)
    last = tl.minimum(group_start + (tile + 1) * ROWS, group_end) - 1 + (s - t)
    begin, _ = keys_met(group_start + tile * ROWS, ROWS, batch, t, s, segment, True)
    for chunk in range(begin // CHUNK, last // CHUNK):
        start = chunk * CHUNK
        columns = start + tl.arange(0, CHUNK)
        is_key = is_token(k_valid, batch, columns, s)
        is_after = (position >= start + CHUNK) & (rows < group_end)
        if segment is not None:
            # X is stored for chunks that a query's segment reaches.
            is_after = is_after & (segment_begin < start + CHUNK)
        offset = (base + chunk) * group_rows * PADDED_D
        factor = y.to(FACTOR)
        store_tile(y_out + offset, local, local < group_rows, PADDED_D, factor, PADDED_D)
        u_tile = rows_of(u, kv_index, tokens, start, CHUNK, PADDED_D)
        d_b = tl.dot(factor, tl.trans(u_tile), input_precision=PRECISION)
        d_b = tl.where(is_after[:, None], d_b, 0.0).to(FACTOR)
        w_tile = rows_of(w, kv_index, tokens, start, CHUNK, PADDED_D)
        y = tl.dot(-d_b, w_tile, y, input_precision=PRECISION)
        values = load_tile(v, columns, is_key, v_token, v_channel, E, PADDED_E).to(FACTOR)
        # Loaded in every iteration, which costs fewer registers than keeping it.
        d_o = load_tile(d_out, rows, is_row, g_token, g_channel, E, PADDED_E).to(FACTOR)
        d_a = tl.dot(d_o, tl.trans(values), input_precision=PRECISION)
        x = load_tile(x_in + offset, local, is_after, PADDED_D, 1, PADDED_D, PADDED_D)
        carried = rows_of(keys, kv_index, tokens, start, CHUNK, PADDED_D)
        scores = tl.dot(x, tl.trans(carried), input_precision=PRECISION) * (scale * LOG2_E)
        if HAS_WINDOW or k_valid is not None or segment is not None:
            mask = path_may_attend(
                rows[:, None], columns[None, :], is_key[None, :], batch, t, s,
                segment, window, HAS_WINDOW,
            )  # fmt: skip
            scores = tl.where(mask, scores, float("-inf"))
        a = tl.exp2(scores - logs[:, None])
        d_scores = a * (d_a - sums[:, None]) * scale
        d_scores = tl.where(is_after[:, None], d_scores, 0.0)
        # Loaded again, which costs fewer registers than keeping it.
        carried = rows_of(keys, kv_index, tokens, start, CHUNK, PADDED_D)
        y = add_product(d_scores, carried, y, PRECISION, TWO_PARTS)
    is_present = (rows < t) & (rows < group_end)
    store_tile(chunk_y + at * PADDED_D, rows, is_present, PADDED_D, y, PADDED_D)
