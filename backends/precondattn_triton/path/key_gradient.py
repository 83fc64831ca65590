"""PaTH backward: the gradients of v, K and P of a chunk or block, from all queries that enter it.

With x the query as it enters chunk c, and y the gradient of x as it leaves it
(`carried_queries.py`); K is K̃ for chunks, K̂ for blocks,

    key value gradient    dv += Aᵀ do,    dK += dSᵀ x    one program per tile of keys, kv head
    reflections           F += xᵀ y                       one per part of F, chunk or block, kv head

and sequence. A = e^{s x Kᵀ − λ} is recomputed in tiles, and dS = s A ∘ (do vᵀ − D). F is the
gradient of P. The kernels run for one group of queries at a time (`groups.py`), and add to the
results of the groups before. A program loops over the query heads of its group. No two programs add
to the same element, so the result is deterministic. Products per head, in units of t² / 2: key
value gradient 2 d + 2 e, reflections d² / S; for chunks, in units of t S / 2, 2 d + 2 e and d² / C.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.path.chunks import rows_of, store_rows
from precondattn_triton.path.forward import first_key
from precondattn_triton.path.groups import stored_row
from precondattn_triton.softmax.score_tiles import load_logs
from precondattn_triton.tiles import (
    LOG2_E,
    addresses,
    is_token,
    load_channels,
    load_tile,
    start_of,
    tile_of_program,
)


@triton.jit
def entering_queries(
    first, count, batch, s, past, masks, window, group, COLUMNS: tl.constexpr
):  # fmt: skip
    """The range of positions of a group's queries that may attend to `count` keys of a chunk,

    and that come after the chunk and are in its parent.
    """
    length, per_parent = group.length, group.per_parent
    chunk = first // length
    stop = tl.minimum((chunk // per_parent + 1) * per_parent * length, group.end)
    if masks.segment is not None:
        last = tl.minimum(tl.maximum(first + count, 1), s) - 1
        stop = tl.minimum(stop, tl.load(masks.segment + batch * 2 * s + s + last))
    if window is not None:
        stop = tl.minimum(stop, first + count - 1 + window)
    begin = tl.maximum((chunk + 1) * length, group.start)
    return tl.maximum(begin, past // COLUMNS * COLUMNS), stop


@triton.jit
def key_value_gradient(
    x_in, v, keys, d_out, log_total, d_sum, d_keys, d_v,
    masks, window, group, sizes, tokens, key_tokens, key_start, key_end,
    ADDS: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    t, s, h, n, scale = sizes.t, sizes.s, sizes.h, sizes.n, sizes.scale
    tiles = (key_end - key_start) // ROWS
    tile, batch, kv = tile_of_program(tiles, n)
    # The first keys come first: they have the most queries.
    first = key_start + (tiles - 1 - tile) * ROWS
    past = s - t
    kv_index = batch * n + kv
    begin, stop = entering_queries(first, ROWS, batch, s, past, masks, window, group, COLUMNS)
    if begin >= stop:
        if not ADDS:
            none = tl.zeros((ROWS, PADDED_D), tl.float32)
            store_rows(d_keys, kv_index, key_tokens, first, none)
        return
    columns = first + tl.arange(0, ROWS)
    is_key = is_token(masks.k_valid, batch, columns, s)
    carried = rows_of(keys, kv_index, key_tokens, first, ROWS, PADDED_D)
    FACTOR: tl.constexpr = keys.dtype.element_ty
    values = load_channels(v, start_of(v, batch, kv), columns, is_key, E, PADDED_E).to(FACTOR)

    key_acc = tl.zeros((ROWS, PADDED_D), tl.float32)
    if ADDS:
        key_acc = rows_of(d_keys, kv_index, key_tokens, first, ROWS, PADDED_D)
    value_acc = rows_of(d_v, kv_index, tokens, first, ROWS, PADDED_E)
    chunk = first // group.length % group.per_parent
    for member in range(0, h // n):
        head = kv * (h // n) + member
        x_start = x_in + (batch * h + head) * group.stored * PADDED_D
        g_start = start_of(d_out, batch, head)
        at = (batch * h + head) * t
        for position in range(begin, stop, COLUMNS):
            positions = position + tl.arange(0, COLUMNS)
            queries = positions - past
            is_query = (queries >= 0) & (positions < stop)
            is_query = is_query & is_token(masks.q_valid, batch, tl.maximum(queries, 0), t)
            logs = load_logs(log_total, at, queries, is_query)
            is_query = is_query & (logs < float("inf"))
            sums = tl.load(d_sum + at + queries, mask=is_query, other=0.0)
            row = stored_row(position, group) + chunk * group.length
            local = row + tl.arange(0, COLUMNS)
            x = load_tile(x_start, local, is_query, PADDED_D, PADDED_D, PADDED_D)
            d_o = load_channels(d_out, g_start, queries, is_query, E, PADDED_E).to(FACTOR)
            # All transposed: keys × queries.
            scores = tl.dot(carried, tl.trans(x), input_precision=PRECISION) * (scale * LOG2_E)
            if (window is not None or masks.k_valid is not None) or masks.segment is not None:
                first_keys = first_key(tl.minimum(positions, s - 1), batch, s, masks, window)
                mask = is_key[:, None] & (columns[:, None] >= first_keys[None, :])
                scores = tl.where(mask, scores, float("-inf"))
            a = tl.exp2(scores - logs[None, :])
            value_acc = tl.dot(a.to(FACTOR), d_o, value_acc, input_precision=PRECISION)
            d_a = tl.dot(values, tl.trans(d_o), input_precision=PRECISION)
            d_scores = (a * (d_a - sums[None, :]) * scale).to(FACTOR)
            key_acc = tl.dot(d_scores, x, key_acc, input_precision=PRECISION)
    store_rows(d_keys, kv_index, key_tokens, first, key_acc)
    store_rows(d_v, kv_index, tokens, first, value_acc)


@triton.jit
def reflections(
    x_in, y_in, d_matrices, masks, window, group, sizes, matrices, first_chunk, last_chunk,
    PADDED_D: tl.constexpr, WIDTH: tl.constexpr, ADDS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    t, s, h, n = sizes.t, sizes.s, sizes.h, sizes.n
    PARTS: tl.constexpr = PADDED_D // WIDTH
    chunks = last_chunk - first_chunk
    chunk_and_part, batch, kv = tile_of_program(chunks * PARTS, n)
    part = chunk_and_part % PARTS
    # The first chunks come first: they have the most queries.
    chunk = last_chunk - 1 - chunk_and_part // PARTS
    past = s - t
    begin, stop = entering_queries(
        chunk * group.length, group.length, batch, s, past, masks, window, group, COLUMNS
    )
    channels = tl.arange(0, PADDED_D)
    columns = part * WIDTH + tl.arange(0, WIDTH)
    d_matrices += ((batch * n + kv) * matrices + chunk) * PADDED_D * PADDED_D
    at_acc = addresses(d_matrices, channels, PADDED_D, columns, 1)
    acc = tl.zeros((PADDED_D, WIDTH), tl.float32)
    if begin >= stop:
        if not ADDS:
            tl.store(at_acc, acc)
        return
    if ADDS:
        acc = tl.load(at_acc)
    for member in range(0, h // n):
        head = kv * (h // n) + member
        offset = (batch * h + head) * group.stored * PADDED_D
        for position in range(begin, stop, COLUMNS):
            positions = position + tl.arange(0, COLUMNS)
            is_query = (positions >= past) & (positions < stop)
            row = stored_row(position, group)
            local = row + chunk % group.per_parent * group.length + tl.arange(0, COLUMNS)
            x = load_tile(x_in + offset, local, is_query, PADDED_D, PADDED_D, PADDED_D)
            at = addresses(y_in + offset, local, PADDED_D, columns, 1)
            y = tl.load(at, mask=is_query[:, None], other=0.0)
            acc = tl.dot(tl.trans(x), y, acc, input_precision=PRECISION)
    tl.store(at_acc, acc)
