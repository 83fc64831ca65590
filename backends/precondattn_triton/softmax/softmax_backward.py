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

In LASER's close heads v is W, do is G, D is D' (`laser_values.py`), and dv = (W + u) ∘ AᵀG. A
program of another head returns at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precondattn_triton.launching import cdiv, launch
from precondattn_triton.softmax.channel_parts import PAIR_CHUNK, products_by_chunk
from precondattn_triton.softmax.reach import (
    is_visited,
    is_within,
    keys_in_reach,
    keys_of,
    may_attend_within,
    queries_in_reach,
    queries_of,
    tokens_again,
    visited,
    visits,
)
from precondattn_triton.softmax.score_options import distances, scores_and_slopes
from precondattn_triton.softmax.score_tiles import add_product, load_logs
from precondattn_triton.softmax.softmax_forward import AttentionCall
from precondattn_triton.softmax.tile_order import (
    bias_tile_of_program,
    keys_of_program,
    rows_of_program,
)
from precondattn_triton.tiles import (
    LOG2_E,
    factor_dtype,
    heads,
    is_token,
    load_channels,
    start_of,
    store_channels,
)


@triton.jit
def store_pairs(array, first, rows, columns, s, is_row, is_column, values):
    """Store a tile of pairs, whose queries begin at row `first` of the array (…, s)."""
    at = (first + rows[:, None]) * s + columns[None, :]
    mask = is_row[:, None] & is_column[None, :]
    tl.store(array + at, values.to(array.dtype.element_ty), mask=mask)


@triton.jit
def _query_gradient(
    q, k, v, d_out, sink, value_range, logs, d_sums, d_q, d_sink, d_slopes, d_bias,
    masks, scoring, sizes,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_E: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    TWO_PARTS: tl.constexpr, EXACT: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    tile, part, batch, head, kv, rows, is_row = rows_of_program(masks, sizes, CAUSAL, ROWS, PARTS)
    closeness = value_range.is_close
    if closeness is not None and tl.load(closeness + batch * sizes.n + kv) == 0:
        return
    first, at = part * PADDED_D, (batch * sizes.h + head) * sizes.t
    row_logs = load_logs(logs, at, rows, is_row)
    is_row = is_row & (row_logs < float("inf"))
    sums = tl.load(d_sums + at + rows, mask=is_row, other=0.0)
    q_start, g_start = start_of(q, batch, head), start_of(d_out, batch, head)
    k_start, v_start = start_of(k, batch, kv), start_of(v, batch, kv)
    if CHUNK == 0:
        q_tile = load_channels(q, q_start, rows, is_row, D, PADDED_D)
        d_o = load_channels(d_out, g_start, rows, is_row, E, PADDED_E).to(FACTOR)

    acc = tl.zeros((ROWS, PADDED_D), tl.float32)
    d_slope = tl.zeros((ROWS,), tl.float32)
    begin, low, high, end = keys_in_reach(
        tile * ROWS, ROWS, batch, masks, scoring, sizes, CAUSAL, COLUMNS
    )
    has_first: tl.constexpr = scoring.window is not None or masks.segment is not None
    first_keys, last_keys = keys_of(rows[:, None], batch, masks, scoring, sizes, CAUSAL)
    # Two loops over wide rows in float32 spill more registers than one.
    IS_WIDE: tl.constexpr = CHUNK > 0 or (EXACT and PADDED_D + PADDED_E > 256)
    IS_ONE_LOOP: tl.constexpr = IS_WIDE or masks.k_valid is not None
    if IS_ONE_LOOP:
        low, high = begin, begin
    for phase in tl.static_range(1 if IS_ONE_LOOP else 0, 2):
        first_visit, last_visit = visits(begin, low, high, end, phase)
        for visit in range(first_visit, last_visit, COLUMNS):
            columns = visited(visit, low, high, phase) + tl.arange(0, COLUMNS)
            is_key = is_visited(masks.k_valid, batch, columns, sizes.s, phase == 0)
            k_tile = load_channels(
                k, k_start, columns, is_key, D, PADDED_D, first, IS_WHOLE=phase == 0
            )
            if CHUNK == 0:
                values = load_channels(
                    v, v_start, columns, is_key, E, PADDED_E, IS_WHOLE=phase == 0
                ).to(FACTOR)
                products = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            else:
                products = products_by_chunk(
                    q, q_start, rows, is_row, k, k_start, columns, is_key, D, CHUNK, PRECISION
                )
            if CHUNK == 0:
                d_a = tl.dot(d_o, tl.trans(values), input_precision=PRECISION)
            else:
                d_a = products_by_chunk(
                    d_out, g_start, rows, is_row, v, v_start, columns, is_key, E, CHUNK, PRECISION
                )
            scores, slope = scores_and_slopes(
                products, rows[:, None], columns[None, :], is_row[:, None] & is_key[None, :],
                batch, head, sizes.t, sizes.s, sizes.scale, scoring, EXACT, row_logs[:, None],
            )  # fmt: skip
            if phase == 1:
                mask = is_within(columns[None, :], first_keys, last_keys, has_first)
                if masks.k_valid is not None:
                    mask &= is_key[None, :]
                scores = tl.where(mask, scores, float("-inf"))
            d_s = tl.exp2(scores) * (d_a - sums[:, None])
            if scoring.slopes is not None:
                apart = distances(rows[:, None], columns[None, :], sizes.t, sizes.s)
                d_slope += tl.sum(d_s * apart, 1)
            if d_bias is not None:
                is_stored = (rows < sizes.t) & (part == 0)
                is_column = is_visited(None, batch, columns, sizes.s, phase == 0)
                store_pairs(d_bias, at, rows, columns, sizes.s, is_stored, is_column, d_s)
            if scoring.softcap is not None:
                d_s *= slope
            acc = add_product(d_s, k_tile.to(FACTOR), acc, PRECISION, TWO_PARTS)
    start = (batch * sizes.t * sizes.h + head) * D
    sum_of_program = (batch * tl.cdiv(sizes.t, ROWS) + tile) * sizes.h + head
    if sink is not None:
        sigma = tl.load(sink + head).to(tl.float32) * LOG2_E
        d_sigma = -tl.sum(tl.exp2(sigma - row_logs) * sums, 0)
        tl.store(d_sink + sum_of_program, d_sigma, mask=part == 0)
    if scoring.slopes is not None:
        tl.store(d_slopes + sum_of_program, -tl.sum(d_slope, 0), mask=part == 0)
    rows = tokens_again(tile, ROWS)
    store_channels(d_q + start, rows, rows < sizes.t, sizes.h * D, acc * sizes.scale, D, first)


@triton.jit
def _key_gradient(
    q, k, v, d_out, value_range, logs, d_sums, d_k, d_v, masks, scoring, sizes,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_E: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    TWO_PARTS: tl.constexpr, EXACT: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    tile, part, batch, kv, keys, is_key = keys_of_program(masks, sizes, CAUSAL, ROWS, PARTS)
    closeness = value_range.is_close
    if closeness is not None and tl.load(closeness + batch * sizes.n + kv) == 0:
        return
    # The parts of keys and of values have equal widths.
    first = part * PADDED_D
    k_start, v_start = start_of(k, batch, kv), start_of(v, batch, kv)
    if CHUNK == 0:
        k_tile = load_channels(k, k_start, keys, is_key, D, PADDED_D)
        values = load_channels(v, v_start, keys, is_key, E, PADDED_E).to(FACTOR)

    key_acc = tl.zeros((ROWS, PADDED_D), tl.float32)
    value_acc = tl.zeros((ROWS, PADDED_E), tl.float32)
    begin, low, high, end = queries_in_reach(
        tile * ROWS, ROWS, batch, masks, scoring, sizes, CAUSAL, COLUMNS
    )
    # Two loops over wide rows in float32 spill more registers than one.
    IS_WIDE: tl.constexpr = tl.float32 == FACTOR and PADDED_D + PADDED_E > 256
    IS_ONE_LOOP: tl.constexpr = CHUNK > 0 or IS_WIDE
    if IS_ONE_LOOP:
        low, high = begin, begin
    for phase in tl.static_range(1 if IS_ONE_LOOP else 0, 2):
        first_visit, last_visit = visits(begin, low, high, end, phase)
        if phase == 1:
            keys = tokens_again(tile, ROWS)
            has_first: tl.constexpr = (
                CAUSAL or scoring.window is not None or masks.segment is not None
            )
            first_queries, last_queries = queries_of(
                keys[:, None], batch, masks, scoring, sizes, CAUSAL
            )
        for member in range(0, sizes.h // sizes.n):
            head = kv * (sizes.h // sizes.n) + member
            at = (batch * sizes.h + head) * sizes.t
            q_start, g_start = start_of(q, batch, head), start_of(d_out, batch, head)
            for visit in range(first_visit, last_visit, COLUMNS):
                queries = visited(visit, low, high, phase) + tl.arange(0, COLUMNS)
                is_query = is_visited(masks.q_valid, batch, queries, sizes.t, phase == 0)
                IS_WHOLE: tl.constexpr = phase == 0 and masks.q_valid is None
                row_logs = load_logs(logs, at, queries, is_query)
                sums = tl.load(d_sums + at + queries, mask=is_query, other=0.0)
                # Tiles are transposed: keys × queries.
                if CHUNK == 0:
                    q_tile = load_channels(
                        q, q_start, queries, is_query, D, PADDED_D, IS_WHOLE=IS_WHOLE
                    )
                    d_o = load_channels(
                        d_out, g_start, queries, is_query, E, PADDED_E, IS_WHOLE=IS_WHOLE
                    ).to(FACTOR)
                    products = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
                else:
                    products = products_by_chunk(
                        k, k_start, keys, is_key, q, q_start, queries, is_query,
                        D, CHUNK, PRECISION,
                    )  # fmt: skip
                scores, slope = scores_and_slopes(
                    products, queries[None, :], keys[:, None],
                    is_query[None, :] & is_key[:, None], batch, head,
                    sizes.t, sizes.s, sizes.scale, scoring, EXACT, row_logs[None, :],
                )  # fmt: skip
                if phase == 1:
                    mask = is_within(queries[None, :], first_queries, last_queries, has_first)
                    scores = tl.where(mask, scores, float("-inf"))
                a = tl.exp2(scores)
                if CHUNK > 0:
                    d_o = load_channels(d_out, g_start, queries, is_query, E, PADDED_E, first)
                    d_o = d_o.to(FACTOR)
                value_acc = add_product(a, d_o, value_acc, PRECISION, TWO_PARTS)
                if CHUNK == 0:
                    d_a = tl.dot(values, tl.trans(d_o), input_precision=PRECISION)
                else:
                    d_a = products_by_chunk(
                        v, v_start, keys, is_key, d_out, g_start, queries, is_query,
                        E, CHUNK, PRECISION,
                    )  # fmt: skip
                d_s = a * (d_a - sums[None, :])
                if scoring.softcap is not None:
                    d_s *= slope
                if CHUNK > 0:
                    q_tile = load_channels(q, q_start, queries, is_query, D, PADDED_D, first)
                key_acc = add_product(d_s, q_tile.to(FACTOR), key_acc, PRECISION, TWO_PARTS)
    is_key = is_token(masks.k_valid, batch, keys, sizes.s)
    is_present, start = keys < sizes.s, batch * sizes.s * sizes.n + kv
    if value_range.is_close is not None:
        values = load_channels(v, v_start, keys, is_key, E, PADDED_E, first).to(tl.float32)
        channels = first + tl.arange(0, PADDED_E)
        at_less = value_range.less + (batch * sizes.n + kv) * E + channels
        value_acc *= values + tl.load(at_less, mask=channels < E, other=0.0)[None, :]
    # Invalid keys are not masked in the loops.
    key_acc = tl.where(is_key[:, None], key_acc * sizes.scale, 0.0)
    value_acc = tl.where(is_key[:, None], value_acc, 0.0)
    store_channels(d_k + start * D, keys, is_present, sizes.n * D, key_acc, D, first)
    store_channels(d_v + start * E, keys, is_present, sizes.n * E, value_acc, E, first)


@triton.jit
def _bias_gradient(
    q, k, v, d_out, value_range, logs, d_sums, d_bias, batches, heads, masks, scoring, sizes,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """`batches` sequences and `heads` heads share an entry of the bias."""
    tile, start, first_batch, first_head = bias_tile_of_program(
        sizes.t, sizes.s, sizes.h // heads, ROWS, COLUMNS
    )
    rows = tile * ROWS + tl.arange(0, ROWS)
    columns = start + tl.arange(0, COLUMNS)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for number in range(0, batches * heads):
        batch, head = first_batch + number // heads, first_head + number % heads
        kv = head // (sizes.h // sizes.n)
        begin, _low, _high, end = keys_in_reach(
            tile * ROWS, ROWS, batch, masks, scoring, sizes, CAUSAL, COLUMNS
        )
        is_met = (start >= begin) & (start < end)
        if value_range.is_close is not None:
            is_met = is_met & (tl.load(value_range.is_close + batch * sizes.n + kv) != 0)
        if is_met:
            at = (batch * sizes.h + head) * sizes.t
            is_row = is_token(masks.q_valid, batch, rows, sizes.t)
            row_logs = load_logs(logs, at, rows, is_row)
            is_row = is_row & (row_logs < float("inf"))
            is_key = is_token(masks.k_valid, batch, columns, sizes.s)
            sums = tl.load(d_sums + at + rows, mask=is_row, other=0.0)
            products = products_by_chunk(
                q, start_of(q, batch, head), rows, is_row,
                k, start_of(k, batch, kv), columns, is_key, D, CHUNK, PRECISION,
            )  # fmt: skip
            d_a = products_by_chunk(
                d_out, start_of(d_out, batch, head), rows, is_row,
                v, start_of(v, batch, kv), columns, is_key, E, CHUNK, PRECISION,
            )  # fmt: skip
            scores, _slope = scores_and_slopes(
                products, rows[:, None], columns[None, :], is_row[:, None] & is_key[None, :],
                batch, head, sizes.t, sizes.s, sizes.scale, scoring, EXACT, row_logs[:, None],
            )  # fmt: skip
            mask = may_attend_within(
                rows[:, None], columns[None, :], is_key[None, :], batch,
                masks, scoring, sizes, CAUSAL,
            )  # fmt: skip
            a = tl.exp2(tl.where(mask, scores, float("-inf")))
            acc += a * (d_a - sums[:, None])
    at = (first_batch * (sizes.h // heads) + first_head) * sizes.t
    store_pairs(d_bias, at, rows, columns, sizes.s, rows < sizes.t, columns < sizes.s, acc)


def attention_backward(
    call: AttentionCall,
    bias: torch.Tensor | None,
    logs: torch.Tensor,
    d_sums: torch.Tensor,
    d_out: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """The gradients of all inputs, those of q, k and v in the dtype of the inputs.

    `bias` is the input (b or 1, h or 1, t, s), and `d_sums` is D (b, h, t). LASER's heads that are
    not close are not written; their part of the gradients of bias and slopes is 0.
    """
    (b, t, h, d), (s, n), e = call.q.shape, call.k.shape[1:3], call.v.shape[3]
    d_q, d_k, d_v = (call.q.new_empty(x.shape) for x in (call.q, call.k, call.v))
    gradients = {"q": d_q, "k": d_k, "v": d_v}
    factor = factor_dtype(call.q.dtype)
    inputs = heads(call.q), heads(call.k), heads(call.v), heads(d_out)
    rows = call.value_range, logs, d_sums

    constants = call.constants("query_gradient", factor, d)
    tiles = cdiv(t, constants["ROWS"])
    parts = {
        "sink": None if call.sink is None else logs.new_empty((b, tiles, h)),
        "slopes": None if call.options.slopes is None else logs.new_zeros((b, tiles, h)),
    }
    is_unshared = bias is not None and bias.shape[:2] == (b, h)
    if bias is not None:
        make = torch.zeros_like if is_unshared else torch.empty_like
        gradients["bias"] = make(bias, memory_format=torch.contiguous_format)
    launch(
        _query_gradient, (tiles * constants["PARTS"] * b * h,),
        *inputs, call.sink, *rows, d_q, *parts.values(), gradients["bias"] if is_unshared else None,
        *call.arguments, **constants,
    )  # fmt: skip
    gradients |= {name: part.sum((0, 1)) for name, part in parts.items() if part is not None}

    constants = call.constants("key_gradient", factor, max(d, e))
    launch(
        _key_gradient, (cdiv(s, constants["ROWS"]) * constants["PARTS"] * b * n,),
        *inputs, *rows, d_k, d_v, *call.arguments, **constants,
    )  # fmt: skip

    if bias is not None and not is_unshared:
        constants = call.constants("bias_gradient", factor, e) | {"CHUNK": PAIR_CHUNK}
        for unused in ("PADDED_D", "PADDED_E", "PARTS", "TWO_PARTS", "FACTOR"):
            del constants[unused]
        pairs = cdiv(t, constants["ROWS"]) * cdiv(s, constants["COLUMNS"])
        launch(
            _bias_gradient, (pairs * bias.shape[0] * bias.shape[1],),
            *inputs, *rows, gradients["bias"], b // bias.shape[0], h // bias.shape[1],
            *call.arguments, **constants,
        )  # fmt: skip
    return gradients
