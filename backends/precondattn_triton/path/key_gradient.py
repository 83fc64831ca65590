"""PaTH backward: the gradients of v, K̃ and P = I − wᵀ U of a chunk, from all queries after it.

With x the query as it enters chunk c, and y the gradient of x as it leaves it
(`carried_queries.py`),

    key value gradient    dv += Aᵀ do,    dK̃ += dSᵀ x    one program per tile of keys, kv head
    reflections           F += xᵀ y                        one per block of channels, chunk, kv head

and sequence. A = e^{s x K̃ᵀ − λ} is recomputed in tiles, and dS = s A ∘ (do vᵀ − D). The kernels
run for one group of queries at a time, and add to the results of the groups before; F is the
gradient of P. A program loops over the query heads of its group. No two programs add to the same
element, so the result is deterministic. Products per head, in units of t² / 2: key value gradient
2 d + 2 e, reflections d² / C.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.path.chunks import rows_of, store_rows
from precondattn_triton.path.forward import path_may_attend
from precondattn_triton.softmax.score_tiles import load_logs
from precondattn_triton.tiles import (
    LOG2_E,
    addresses,
    is_token,
    load_tile,
    queries_met,
    tile_of_program,
)


@triton.jit
def key_value_gradient(
    x_in, v, keys, d_out, log_total, d_sum, d_keys, d_v,
    q_valid, k_valid, segment,
    scale, window, group_start, group_end, group_rows, t, s, h, n, tokens, chunks,
    v_batch, v_token, v_head, v_channel, g_batch, g_token, g_head, g_channel,
    HAS_WINDOW: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, batch, kv = tile_of_program(tl.cdiv(chunks * CHUNK, ROWS), n)
    kv_index = batch * n + kv
    chunk = tile * ROWS // CHUNK
    next_chunk = (chunk + 1) * CHUNK - (s - t)
    _, end = queries_met(tile * ROWS, ROWS, batch, t, s, segment, True)
    end = tl.minimum(end, group_end)
    if next_chunk >= end:
        return
    columns = tile * ROWS + tl.arange(0, ROWS)
    is_key = is_token(k_valid, batch, columns, s)
    carried = rows_of(keys, kv_index, tokens, tile * ROWS, ROWS, PADDED_D)
    FACTOR: tl.constexpr = keys.dtype.element_ty
    v += batch * v_batch + kv * v_head
    values = load_tile(v, columns, is_key, v_token, v_channel, E, PADDED_E).to(FACTOR)

    key_acc = rows_of(d_keys, kv_index, tokens, tile * ROWS, ROWS, PADDED_D)
    value_acc = rows_of(d_v, kv_index, tokens, tile * ROWS, ROWS, PADDED_E)
    for member in range(0, h // n):
        head = kv * (h // n) + member
        x_start = x_in + ((batch * h + head) * chunks + chunk) * group_rows * PADDED_D
        g_start = d_out + batch * g_batch + head * g_head
        at = (batch * h + head) * t
        first = tl.maximum(next_chunk, group_start) - group_start
        for start in range(first // COLUMNS * COLUMNS, end - group_start, COLUMNS):
            local = start + tl.arange(0, COLUMNS)
            queries = group_start + local
            is_query = is_token(q_valid, batch, queries, t)
            is_query = is_query & (queries < end) & (queries >= next_chunk)
            logs = load_logs(log_total, at, queries, is_query)
            is_query = is_query & (logs < float("inf"))
            sums = tl.load(d_sum + at + queries, mask=is_query, other=0.0)
            x = load_tile(x_start, local, is_query, PADDED_D, 1, PADDED_D, PADDED_D)
            d_o = load_tile(g_start, queries, is_query, g_token, g_channel, E, PADDED_E).to(FACTOR)
            # All transposed: keys × queries.
            scores = tl.dot(carried, tl.trans(x), input_precision=PRECISION) * (scale * LOG2_E)
            if HAS_WINDOW or k_valid is not None or segment is not None:
                mask = path_may_attend(
                    queries[None, :], columns[:, None], is_key[:, None], batch, t, s,
                    segment, window, HAS_WINDOW,
                )  # fmt: skip
                scores = tl.where(mask, scores, float("-inf"))
            a = tl.exp2(scores - logs[None, :])
            value_acc = tl.dot(a.to(FACTOR), d_o, value_acc, input_precision=PRECISION)
            d_a = tl.dot(values, tl.trans(d_o), input_precision=PRECISION)
            d_scores = (a * (d_a - sums[None, :]) * scale).to(FACTOR)
            key_acc = tl.dot(d_scores, x, key_acc, input_precision=PRECISION)
    store_rows(d_keys, kv_index, tokens, tile * ROWS, key_acc)
    store_rows(d_v, kv_index, tokens, tile * ROWS, value_acc)


@triton.jit
def reflections(
    x_in, y_in, d_whole, segment,
    group_start, group_end, group_rows, t, s, h, n, all_chunks, chunks,
    PADDED_D: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = PADDED_D // WIDTH
    chunk_and_part, batch, kv = tile_of_program(chunks * PARTS, n)
    chunk, part = chunk_and_part // PARTS, chunk_and_part % PARTS
    next_chunk = (chunk + 1) * CHUNK - (s - t)
    _, end = queries_met(chunk * CHUNK, CHUNK, batch, t, s, segment, True)
    end = tl.minimum(end, group_end)
    if next_chunk >= end:
        return
    channels = tl.arange(0, PADDED_D)
    columns = part * WIDTH + tl.arange(0, WIDTH)
    d_whole += ((batch * n + kv) * all_chunks + chunk) * PADDED_D * PADDED_D
    at_acc = addresses(d_whole, channels, PADDED_D, columns, 1)
    acc = tl.load(at_acc)
    for member in range(0, h // n):
        head = kv * (h // n) + member
        offset = ((batch * h + head) * chunks + chunk) * group_rows * PADDED_D
        first = tl.maximum(next_chunk, group_start) - group_start
        for start in range(first // COLUMNS * COLUMNS, end - group_start, COLUMNS):
            local = start + tl.arange(0, COLUMNS)
            queries = group_start + local
            is_query = (queries < end) & (queries >= next_chunk)
            x = load_tile(x_in + offset, local, is_query, PADDED_D, 1, PADDED_D, PADDED_D)
            at = addresses(y_in + offset, local, PADDED_D, columns, 1)
            y = tl.load(at, mask=is_query[:, None], other=0.0)
            acc = tl.dot(tl.trans(x), y, acc, input_precision=PRECISION)
    tl.store(at_acc, acc)
