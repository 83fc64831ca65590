"""Softmax attention with options, backward, from λ, D = rowsum(do ∘ o) and do:

    A = e^{S − λ},    dS = A ∘ (do vᵀ − D),    G = dS ∘ (slope of the cap),
    dq = s G k,    dk = s Gᵀ q,    dv = Aᵀ do,
    dbias = dS,    dm = −Σ_ij |i − j| dS_ij,    dσ = −Σ_i e^{σ − λ_i} D_i.

Kernels recompute A from λ, in the tiles of the forward pass. Kernels, and their grids:

    query gradient    dq, sums for dm and dσ    one program per tile of queries, head and sequence
    key gradient      dk, dv                    one program per tile of keys, kv head and sequence
    bias gradient     dbias                     one program per tile of pairs of a bias

A program of the key gradient loops over the query heads of its group. A bias that each head of each
sequence has for itself gets dS from the query gradient, where each pair is computed once. If heads
or sequences share it, a program of the bias gradient computes dS of a tile of pairs for all of
these in their order, and sums it in registers. No two programs add to the same element, so the
same call gives the same bits. Products per head, half of them if causal: t s (2 d + e),
t s (2 d + 2 e) and t s (d + e).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precondattn_triton.launching import cdiv, launch
from precondattn_triton.softmax.bias_tiles import bias_tile_of_program, store_pairs
from precondattn_triton.softmax.pair_products import row_products_of
from precondattn_triton.softmax.reach import (
    is_within,
    keys_in_reach,
    keys_of,
    may_attend_within,
    queries_in_reach,
    queries_of,
)
from precondattn_triton.softmax.score_options import distances, scores_and_slopes
from precondattn_triton.softmax.score_tiles import add_product, load_logs
from precondattn_triton.softmax.softmax_forward import SoftmaxArrays
from precondattn_triton.softmax.visits import is_visited, visited, visits
from precondattn_triton.tiles import (
    LOG2_E,
    factor_dtype,
    is_token,
    load_tile,
    store_tile,
    tile_of_program,
)


@triton.jit
def _query_gradient(
    q, k, v, sink, d_out, logs, d_sums, d_q, d_sink, d_slopes, d_bias,
    g_batch, g_token, g_head, g_channel,
    q_valid, k_valid, segment,
    softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
    scale, t, s, h, n,
    q_batch, q_token, q_head, q_channel, k_batch, k_token, k_head, k_channel,
    v_batch, v_token, v_head, v_channel,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    TWO_PARTS: tl.constexpr, EXACT: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    tile, batch, head = tile_of_program(tl.cdiv(t, ROWS), h)
    kv = head // (h // n)
    rows = tile * ROWS + tl.arange(0, ROWS)
    at = (batch * h + head) * t
    is_row = is_token(q_valid, batch, rows, t)
    row_logs = load_logs(logs, at, rows, is_row)
    is_row = is_row & (row_logs < float("inf"))
    sums = tl.load(d_sums + at + rows, mask=is_row, other=0.0)
    q_tile = load_tile(
        q + batch * q_batch + head * q_head, rows, is_row, q_token, q_channel, D, PADDED_D
    )
    d_o = load_tile(
        d_out + batch * g_batch + head * g_head, rows, is_row, g_token, g_channel, E, PADDED_E
    ).to(FACTOR)
    k += batch * k_batch + kv * k_head
    v += batch * v_batch + kv * v_head

    acc = tl.zeros((ROWS, PADDED_D), tl.float32)
    d_slope = tl.zeros((ROWS,), tl.float32)
    begin, low, high, end = keys_in_reach(
        tile * ROWS, ROWS, batch, t, s, segment, window, CAUSAL, COLUMNS
    )
    has_first: tl.constexpr = window is not None or segment is not None
    first_keys, last_keys = keys_of(rows[:, None], batch, t, s, segment, window, CAUSAL)
    # Two loops over wide rows in float32 spill more registers than one.
    IS_WIDE: tl.constexpr = EXACT and PADDED_D + PADDED_E > 256
    IS_ONE_LOOP: tl.constexpr = IS_WIDE or k_valid is not None
    if IS_ONE_LOOP:
        low, high = begin, begin
    for phase in tl.static_range(1 if IS_ONE_LOOP else 0, 2):
        first, last = visits(begin, low, high, end, phase)
        for visit in range(first, last, COLUMNS):
            columns = visited(visit, low, high, phase) + tl.arange(0, COLUMNS)
            is_key = is_visited(k_valid, batch, columns, s, phase == 0)
            k_tile = load_tile(k, columns, is_key, k_token, k_channel, D, PADDED_D)
            values = load_tile(v, columns, is_key, v_token, v_channel, E, PADDED_E).to(FACTOR)
            products = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            d_a = tl.dot(d_o, tl.trans(values), input_precision=PRECISION)
            scores, slope = scores_and_slopes(
                products, rows[:, None], columns[None, :], is_row[:, None] & is_key[None, :],
                batch, head, t, s, scale,
                softcap, bias, slopes, bias_batch, bias_head, bias_row, bias_column, EXACT,
                row_logs[:, None],
            )  # fmt: skip
            if phase == 1:
                mask = is_within(columns[None, :], first_keys, last_keys, has_first)
                if k_valid is not None:
                    mask &= is_key[None, :]
                scores = tl.where(mask, scores, float("-inf"))
            d_s = tl.exp2(scores) * (d_a - sums[:, None])
            if slopes is not None:
                d_slope += tl.sum(d_s * distances(rows[:, None], columns[None, :], t, s), 1)
            if d_bias is not None:
                is_column = is_visited(None, batch, columns, s, phase == 0)
                store_pairs(d_bias, at, rows, columns, s, rows < t, is_column, d_s)
            if softcap is not None:
                d_s *= slope
            acc = add_product(d_s, k_tile.to(FACTOR), acc, PRECISION, TWO_PARTS)
    store_tile(d_q + (batch * t * h + head) * D, rows, rows < t, h * D, acc * scale, D)
    part = (batch * tl.cdiv(t, ROWS) + tile) * h + head
    if slopes is not None:
        tl.store(d_slopes + part, -tl.sum(d_slope, 0))
    if sink is not None:
        sigma = tl.load(sink + head).to(tl.float32) * LOG2_E
        tl.store(d_sink + part, -tl.sum(tl.exp2(sigma - row_logs) * sums, 0))


@triton.jit
def _key_gradient(
    q, k, v, d_out, logs, d_sums, d_k, d_v,
    g_batch, g_token, g_head, g_channel,
    q_valid, k_valid, segment,
    softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
    scale, t, s, h, n,
    q_batch, q_token, q_head, q_channel, k_batch, k_token, k_head, k_channel,
    v_batch, v_token, v_head, v_channel,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    TWO_PARTS: tl.constexpr, EXACT: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    # The first tiles have the most work in a causal call.
    tile, batch, kv = tile_of_program(tl.cdiv(s, ROWS), n)
    if CAUSAL:
        tile = tl.cdiv(s, ROWS) - 1 - tile
    keys = tile * ROWS + tl.arange(0, ROWS)
    is_key = is_token(k_valid, batch, keys, s)
    k_tile = load_tile(
        k + batch * k_batch + kv * k_head, keys, is_key, k_token, k_channel, D, PADDED_D
    )
    values = load_tile(
        v + batch * v_batch + kv * v_head, keys, is_key, v_token, v_channel, E, PADDED_E
    ).to(FACTOR)

    key_acc = tl.zeros((ROWS, PADDED_D), tl.float32)
    value_acc = tl.zeros((ROWS, PADDED_E), tl.float32)
    begin, low, high, end = queries_in_reach(
        tile * ROWS, ROWS, batch, t, s, segment, window, CAUSAL, COLUMNS
    )
    # Two loops over wide rows in float32 spill more registers than one.
    IS_ONE_LOOP: tl.constexpr = EXACT and PADDED_D + PADDED_E > 256
    if IS_ONE_LOOP:
        low, high = begin, begin
    for phase in tl.static_range(1 if IS_ONE_LOOP else 0, 2):
        first, last = visits(begin, low, high, end, phase)
        if phase == 1:
            has_first: tl.constexpr = CAUSAL or window is not None or segment is not None
            first_queries, last_queries = queries_of(
                keys[:, None], batch, t, s, segment, window, CAUSAL
            )  # fmt: skip
        for member in range(0, h // n):
            head = kv * (h // n) + member
            at = (batch * h + head) * t
            q_start = q + batch * q_batch + head * q_head
            g_start = d_out + batch * g_batch + head * g_head
            for visit in range(first, last, COLUMNS):
                queries = visited(visit, low, high, phase) + tl.arange(0, COLUMNS)
                is_query = is_visited(q_valid, batch, queries, t, phase == 0)
                row_logs = load_logs(logs, at, queries, is_query)
                sums = tl.load(d_sums + at + queries, mask=is_query, other=0.0)
                q_tile = load_tile(q_start, queries, is_query, q_token, q_channel, D, PADDED_D)
                d_o = load_tile(
                    g_start, queries, is_query, g_token, g_channel, E, PADDED_E
                ).to(FACTOR)  # fmt: skip
                # Tiles are transposed: keys × queries.
                products = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
                d_a = tl.dot(values, tl.trans(d_o), input_precision=PRECISION)
                scores, slope = scores_and_slopes(
                    products, queries[None, :], keys[:, None],
                    is_query[None, :] & is_key[:, None], batch, head, t, s, scale,
                    softcap, bias, slopes, bias_batch, bias_head, bias_row, bias_column, EXACT,
                    row_logs[None, :],
                )  # fmt: skip
                if phase == 1:
                    mask = is_within(queries[None, :], first_queries, last_queries, has_first)
                    scores = tl.where(mask, scores, float("-inf"))
                a = tl.exp2(scores)
                value_acc = add_product(a, d_o, value_acc, PRECISION, TWO_PARTS)
                d_s = a * (d_a - sums[None, :])
                if softcap is not None:
                    d_s *= slope
                key_acc = add_product(d_s, q_tile.to(FACTOR), key_acc, PRECISION, TWO_PARTS)
    is_kept = is_key[:, None]  # Invalid keys are not masked in the loops.
    start = batch * s * n + kv
    key_acc = tl.where(is_kept, key_acc * scale, 0.0)
    store_tile(d_k + start * D, keys, keys < s, n * D, key_acc, D)
    store_tile(d_v + start * E, keys, keys < s, n * E, tl.where(is_kept, value_acc, 0.0), E)


@triton.jit
def _bias_gradient(
    q, k, v, d_out, logs, d_sums, d_bias, batches, heads,
    g_batch, g_token, g_head, g_channel,
    q_valid, k_valid, segment,
    softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
    scale, t, s, h, n,
    q_batch, q_token, q_head, q_channel, k_batch, k_token, k_head, k_channel,
    v_batch, v_token, v_head, v_channel,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    TWO_PARTS: tl.constexpr, EXACT: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """`batches` sequences and `heads` heads share an entry of the bias."""
    tile, start, first_batch, first_head = bias_tile_of_program(t, s, h // heads, ROWS, COLUMNS)
    rows = tile * ROWS + tl.arange(0, ROWS)
    columns = start + tl.arange(0, COLUMNS)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for number in range(0, batches * heads):
        batch, head = first_batch + number // heads, first_head + number % heads
        kv = head // (h // n)
        begin, _low, _high, end = keys_in_reach(
            tile * ROWS, ROWS, batch, t, s, segment, window, CAUSAL, COLUMNS
        )
        if (start >= begin) & (start < end):
            at = (batch * h + head) * t
            is_row = is_token(q_valid, batch, rows, t)
            row_logs = load_logs(logs, at, rows, is_row)
            is_row = is_row & (row_logs < float("inf"))
            is_key = is_token(k_valid, batch, columns, s)
            sums = tl.load(d_sums + at + rows, mask=is_row, other=0.0)
            products = row_products_of(
                q + batch * q_batch + head * q_head, rows, is_row, q_token, q_channel,
                k + batch * k_batch + kv * k_head, columns, is_key, k_token, k_channel,
                D, PADDED_D, ROWS, COLUMNS, PRECISION,
            )  # fmt: skip
            scores, _slope = scores_and_slopes(
                products, rows[:, None], columns[None, :], is_row[:, None] & is_key[None, :],
                batch, head, t, s, scale,
                softcap, bias, slopes, bias_batch, bias_head, bias_row, bias_column, EXACT,
            )  # fmt: skip
            mask = may_attend_within(
                rows[:, None], columns[None, :], is_key[None, :], batch, t, s,
                segment, window, CAUSAL,
            )  # fmt: skip
            a = tl.exp2(tl.where(mask, scores - row_logs[:, None], float("-inf")))
            d_a = row_products_of(
                d_out + batch * g_batch + head * g_head, rows, is_row, g_token, g_channel,
                v + batch * v_batch + kv * v_head, columns, is_key, v_token, v_channel,
                E, PADDED_E, ROWS, COLUMNS, PRECISION,
            )  # fmt: skip
            acc += a * (d_a - sums[:, None])
    at = (first_batch * (h // heads) + first_head) * t
    store_pairs(d_bias, at, rows, columns, s, rows < t, columns < s, acc)


def softmax_backward(
    call: SoftmaxArrays,
    bias: torch.Tensor | None,
    logs: torch.Tensor,
    d_sums: torch.Tensor,
    d_out: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """The gradients of all inputs; `bias` is the input (b or 1, h or 1, t, s), and `d_sums` is D
    (b, h, t)."""
    (b, t, h, _), (s, n) = call.q.shape, call.k.shape[1:3]
    d_q, d_k, d_v = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (call.q, call.k, call.v)
    )
    gradients = {"q": d_q, "k": d_k, "v": d_v}
    factor = factor_dtype(call.v.dtype)
    from_out = d_out, logs, d_sums
    strides = d_out.stride()

    constants = call.constants("softmax_query_gradient", factor)
    tiles = cdiv(t, constants["ROWS"])
    parts = {
        "sink": None if call.sink is None else logs.new_empty((b, tiles, h)),
        "slopes": None if call.options.slopes is None else logs.new_empty((b, tiles, h)),
    }
    is_own = bias is not None and bias.shape[:2] == (b, h)
    if bias is not None:
        make = torch.zeros_like if is_own else torch.empty_like
        gradients["bias"] = make(bias, memory_format=torch.contiguous_format)
    launch(
        _query_gradient, (tiles * b * h,),
        call.q, call.k, call.v, call.sink, *from_out, d_q, *parts.values(),
        gradients["bias"] if is_own else None, *strides, *call.arguments,
        **constants,
    )  # fmt: skip
    gradients |= {name: part.sum((0, 1)) for name, part in parts.items() if part is not None}

    constants = call.constants("softmax_key_gradient", factor)
    launch(
        _key_gradient, (cdiv(s, constants["ROWS"]) * b * n,),
        call.q, call.k, call.v, *from_out, d_k, d_v, *strides, *call.arguments,
        **constants,
    )  # fmt: skip

    if bias is not None and not is_own:
        constants = call.constants("softmax_bias_gradient", factor)
        pairs = cdiv(t, constants["ROWS"]) * cdiv(s, constants["COLUMNS"])
        launch(
            _bias_gradient, (pairs * bias.shape[0] * bias.shape[1],),
            call.q, call.k, call.v, *from_out, gradients["bias"],
            b // bias.shape[0], h // bias.shape[1], *strides, *call.arguments,
            **constants,
        )  # fmt: skip
    return gradients
