"""LASER backward, from o, λ and the output's gradient do, with D_i = Σ_c do_ic:

    w_ijc = e^{s_ij − λ_i + v_jc − o_ic},    a_ij = e^{s_ij − λ_i},    s_ij = scale ⟨q_i, k_j⟩,
    dv_jc = Σ_i do_ic w_ijc,    ds_ij = Σ_c do_ic w_ijc − a_ij D_i,
    dq = scale ds k,    dk = scale dsᵀ q.

Weights are recomputed from λ. In close heads (see `laser_forward.py`) this is the gradient of flash
attention with the values W = e^{v − ν} − u,

    G = do ∘ e^{ν − o},    dW = Aᵀ G,    dv = (W + u) ∘ dW,    ds = A ∘ (G Wᵀ − D'),
    D'_i = Σ_c G_ic (e^{o_ic − ν_c} − u_c),

where D' also uses the rounded G: then rounding scales the part of each channel in ds, and Σ_j ds_ij
stays 0. In exact heads the sums are computed directly, for one key (dq) or one query (dk and dv) at
a time, and a block of channels.

Kernels, in order, and their grids:

    cotangent               G (b, t, h, e) and D'    one program per tile of queries and head
    query gradient          dq of close heads        one program per tile of queries and head
    key gradient            dk, dv of close heads    one program per tile of keys and kv head
    exact query gradient    dq of other heads        one program per tile of queries and head
    exact key gradient      dk, dv of other heads    one program per tile of keys and kv head

A program of a key gradient loops over the query heads of its group. No two programs add to the same
element, so the result is deterministic. It visits the inner tiles of all heads before those at a
border (`inner_tiles.py`). FLOPs per close head, half of them if causal: dq
2 t s (2 d + e), dk and dv 2 t s (2 d + 2 e). Exact: 2 t s e exponentials for each of the two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precondattn.kernel_backend.limits import padded_width
from precondattn_triton.launching import cdiv, launch
from precondattn_triton.precision import product_precision
from precondattn_triton.softmax.inner_tiles import (
    inner_keys,
    inner_queries,
    load_visited,
    tokens_again,
    visited,
    visits,
)
from precondattn_triton.softmax.laser_forward import (
    ValueSpread,
    exact_channels,
    exact_configuration,
    is_wide,
    weights,
)
from precondattn_triton.softmax.laser_wide import wide_backward
from precondattn_triton.softmax.tile_order import longest_first
from precondattn_triton.tiles import (
    LOG2_E,
    KernelMasks,
    addresses,
    configured,
    factor_dtype,
    is_token,
    keys_met,
    load_tile,
    may_attend,
    queries_met,
    store_tile,
    tile_of_program,
)

COTANGENT_ELEMENTS = 4096
"""Elements in a tile of `cotangent`."""


# --------------------------------------------------------------------------------- close heads


@triton.jit
def _cotangent(
    d_out, full, log_total, shift, less, is_close, g, d_sum,
    q_valid,
    t, h, n,
    o_batch, o_token, o_head, o_channel,
    E: tl.constexpr, PADDED_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile, batch, head = tile_of_program(tl.cdiv(t, ROWS), h)
    kv = head // (h // n)
    if tl.load(is_close + batch * n + kv) == 0:
        return
    rows = tile * ROWS + tl.arange(0, ROWS)
    is_row = is_token(q_valid, batch, rows, t)
    logs = tl.load(log_total + (batch * h + head) * t + rows, mask=is_row, other=float("inf"))
    has_keys = logs < float("inf")
    start = (batch * t * h + head) * E
    d_o = load_tile(
        d_out + batch * o_batch + head * o_head, rows, has_keys, o_token, o_channel, E, PADDED_E
    ).to(tl.float32)
    o = load_tile(full + start, rows, has_keys, h * E, 1, E, PADDED_E)
    channels = tl.arange(0, PADDED_E)
    at = (batch * n + kv) * E + channels
    nu = tl.load(shift + at, mask=channels < E, other=0.0)
    u = tl.load(less + at, mask=channels < E, other=0.0)
    above = tl.where(has_keys[:, None], nu[None, :] - o, 0.0) * LOG2_E
    rounded = (d_o * tl.exp2(above)).to(g.dtype.element_ty)
    sums = tl.sum(rounded.to(tl.float32) * (tl.exp2(-above) - u[None, :]), 1)
    store_tile(g + start, rows, rows < t, h * E, rounded, E)
    tl.store(d_sum + (batch * h + head) * t + rows, sums, mask=rows < t)


@triton.jit
def _query_gradient(
    q, k, w, less, is_close, g, d_sum, log_total, d_q,
    q_valid, k_valid, segment,
    scale, t, s, h, n,
    q_batch, q_token, q_head, q_channel, k_batch, k_token, k_head, k_channel,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(t, ROWS)
    rank, batch, head = longest_first(tiles, h, CAUSAL)
    tile = tiles - 1 - rank
    kv = head // (h // n)
    if tl.load(is_close + batch * n + kv) == 0:
        return
    rows = tile * ROWS + tl.arange(0, ROWS)
    is_row = is_token(q_valid, batch, rows, t)
    q_tile = load_tile(
        q + batch * q_batch + head * q_head, rows, is_row, q_token, q_channel, D, PADDED_D
    )
    g_tile = load_tile(g + (batch * t * h + head) * E, rows, is_row, h * E, 1, E, PADDED_E)
    at = (batch * h + head) * t + rows
    logs = tl.load(log_total + at, mask=is_row, other=float("inf")) * LOG2_E
    sums = tl.load(d_sum + at, mask=is_row, other=0.0)
    k += batch * k_batch + kv * k_head
    w += (batch * n + kv) * s * E

    acc = tl.zeros((ROWS, PADDED_D), tl.float32)
    begin, end = keys_met(tile * ROWS, ROWS, batch, t, s, segment, CAUSAL)
    begin = begin // COLUMNS * COLUMNS
    low, high = inner_keys(tile * ROWS, ROWS, batch, t, s, segment, CAUSAL, COLUMNS)
    for phase in tl.static_range(2):
        first, last = visits(begin, low, high, end, phase)
        for visit in range(first, last, COLUMNS):
            columns = visited(visit, low, high, phase) + tl.arange(0, COLUMNS)
            k_tile = load_visited(
                k, k_valid, batch, columns, s, k_token, k_channel, D, PADDED_D, phase == 0
            )
            w_tile = load_visited(w, None, batch, columns, s, E, 1, E, PADDED_E, phase == 0)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            scores = scores * (scale * LOG2_E) - logs[:, None]
            if phase == 1 or k_valid is not None:
                mask = is_token(k_valid, batch, columns, s)[None, :]
                if phase == 1:
                    mask = may_attend(
                        rows[:, None], columns[None, :], mask, batch, t, s, segment, CAUSAL
                    )
                scores = tl.where(mask, scores, float("-inf"))
            d_a = tl.dot(g_tile, tl.trans(w_tile), input_precision=PRECISION)
            d_scores = (tl.exp2(scores) * (d_a - sums[:, None])).to(w.dtype.element_ty)
            acc = tl.dot(d_scores, k_tile.to(w.dtype.element_ty), acc, input_precision=PRECISION)
    rows = tokens_again(tile, ROWS)
    start = (batch * t * h + head) * D
    store_tile(d_q + start, rows, rows < t, h * D, acc * scale, D)


@triton.jit
def _key_gradient(
    q, k, w, less, is_close, g, d_sum, log_total, d_k, d_v,
    q_valid, k_valid, segment,
    scale, t, s, h, n,
    q_batch, q_token, q_head, q_channel, k_batch, k_token, k_head, k_channel,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, batch, kv = longest_first(tl.cdiv(s, ROWS), n, CAUSAL)
    if tl.load(is_close + batch * n + kv) == 0:
        return
    keys = tile * ROWS + tl.arange(0, ROWS)
    is_key = is_token(k_valid, batch, keys, s)
    k_tile = load_tile(
        k + batch * k_batch + kv * k_head, keys, is_key, k_token, k_channel, D, PADDED_D
    )
    w += (batch * n + kv) * s * E
    w_tile = load_tile(w, keys, keys < s, E, 1, E, PADDED_E)

    key_acc = tl.zeros((ROWS, PADDED_D), tl.float32)
    weight_acc = tl.zeros((ROWS, PADDED_E), tl.float32)
    begin, end = queries_met(tile * ROWS, ROWS, batch, t, s, segment, CAUSAL)
    begin = begin // COLUMNS * COLUMNS
    low, high = inner_queries(tile * ROWS, ROWS, batch, t, s, segment, CAUSAL, COLUMNS)
    # Two loops over wide rows in float32 spill more registers than one.
    IS_ONE_LOOP: tl.constexpr = w.dtype.element_ty == tl.float32 and PADDED_D + PADDED_E > 256
    if IS_ONE_LOOP:
        low, high = begin, begin
    group = h // n
    for phase in tl.static_range(1 if IS_ONE_LOOP else 0, 2):
        if phase == 1:
            keys = tokens_again(tile, ROWS)
        first, last = visits(begin, low, high, end, phase)
        for member in range(0, group):
            head = kv * group + member
            q_start = q + batch * q_batch + head * q_head
            g_start = g + (batch * t * h + head) * E
            for visit in range(first, last, COLUMNS):
                queries = visited(visit, low, high, phase) + tl.arange(0, COLUMNS)
                q_tile = load_visited(
                    q_start, q_valid, batch, queries, t, q_token, q_channel, D, PADDED_D, phase == 0
                )
                g_tile = load_visited(
                    g_start, None, batch, queries, t, h * E, 1, E, PADDED_E, phase == 0
                )
                # λ of an invalid query is ∞.
                at = (batch * h + head) * t + queries
                if phase == 0:
                    logs, sums = tl.load(log_total + at), tl.load(d_sum + at)
                else:
                    logs = tl.load(log_total + at, mask=queries < t, other=float("inf"))
                    sums = tl.load(d_sum + at, mask=queries < t, other=0.0)
                # All transposed: keys × queries.
                scores = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
                scores = scores * (scale * LOG2_E) - (logs * LOG2_E)[None, :]
                if phase == 1:
                    mask = may_attend(
                        queries[None, :], keys[:, None], (keys < s)[:, None], batch,
                        t, s, segment, CAUSAL,
                    )  # fmt: skip
                    scores = tl.where(mask, scores, float("-inf"))
                a = tl.exp2(scores)
                weight_acc = tl.dot(
                    a.to(w.dtype.element_ty), g_tile, weight_acc, input_precision=PRECISION
                )
                d_a = tl.dot(w_tile, tl.trans(g_tile), input_precision=PRECISION)
                d_scores = (a * (d_a - sums[None, :])).to(w.dtype.element_ty)
                key_acc = tl.dot(
                    d_scores, q_tile.to(w.dtype.element_ty), key_acc, input_precision=PRECISION
                )
    is_key = is_token(k_valid, batch, keys, s)[:, None]
    head_start = batch * s * n + kv
    # Weights of invalid keys are not masked in the loops.
    d_keys = tl.where(is_key, key_acc * scale, 0.0)
    store_tile(d_k + head_start * D, keys, keys < s, n * D, d_keys, D)
    w_tile = load_tile(w, keys, keys < s, E, 1, E, PADDED_E).to(tl.float32)
    channels = tl.arange(0, PADDED_E)
    at = (batch * n + kv) * E + channels
    u = tl.load(less + at, mask=channels < E, other=0.0)
    d_values = tl.where(is_key, weight_acc * (w_tile + u[None, :]), 0.0)
    store_tile(d_v + head_start * E, keys, keys < s, n * E, d_values, E)


# --------------------------------------------------------------------------------- exact heads


@triton.jit
def _exact_query_gradient(
    q, k, v, is_close, full, log_total, d_out, d_q,
    q_valid, k_valid, segment,
    scale, t, s, h, n,
    q_batch, q_token, q_head, q_channel, k_batch, k_token, k_head, k_channel,
    v_batch, v_token, v_head, v_channel,
    o_batch, o_token, o_head, o_channel,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(t, ROWS)
    rank, batch, head = longest_first(tiles, h, CAUSAL)
    tile = tiles - 1 - rank
    kv = head // (h // n)
    if tl.load(is_close + batch * n + kv) != 0:
        return
    rows = tile * ROWS + tl.arange(0, ROWS)
    is_row = is_token(q_valid, batch, rows, t)
    q_tile = load_tile(
        q + batch * q_batch + head * q_head, rows, is_row, q_token, q_channel, D, PADDED_D
    ).to(tl.float32)
    at = (batch * h + head) * t + rows[:, None]
    logs = tl.load(log_total + at, mask=is_row[:, None], other=float("inf"))
    k += batch * k_batch + kv * k_head
    v += batch * v_batch + kv * v_head
    full += (batch * t * h + head) * E
    d_out += batch * o_batch + head * o_head

    acc = tl.zeros((ROWS, PADDED_D), tl.float32)
    begin, end = keys_met(tile * ROWS, ROWS, batch, t, s, segment, CAUSAL)
    # Each block of channels adds its part Σ_c do_ic (w_ijc − a_ij) of ds.
    for first in range(0, E, CHANNELS):
        channels = first + tl.arange(0, CHANNELS)
        is_element = is_row[:, None] & (channels < E)[None, :]
        o = tl.load(addresses(full, rows, h * E, channels, 1), mask=is_element, other=0.0)
        d_o = tl.load(
            addresses(d_out, rows, o_token, channels, o_channel), mask=is_element, other=0.0
        ).to(tl.float32)
        sums = tl.sum(d_o, 1, keep_dims=True)
        for j in range(begin, end):
            column = j + tl.arange(0, 1)
            is_key = is_token(k_valid, batch, column, s)
            k_row = load_tile(k, column, is_key, k_token, k_channel, D, PADDED_D).to(tl.float32)
            v_row = tl.load(
                addresses(v, column, v_token, channels, v_channel),
                mask=is_key[:, None] & (channels < E)[None, :],
                other=0.0,
            ).to(tl.float32)
            score = tl.sum(q_tile * k_row, 1, keep_dims=True) * scale
            mask = may_attend(
                rows[:, None],
                column[None, :],
                is_key[None, :],
                batch,
                t,
                s,
                segment,
                CAUSAL,
            )
            log_a = tl.where(mask, score - logs, float("-inf"))
            w = tl.exp(log_a + (v_row - o))
            d_score = tl.sum(d_o * w, 1, keep_dims=True) - tl.exp(log_a) * sums
            acc += d_score * k_row
    start = (batch * t * h + head) * D
    store_tile(d_q + start, rows, rows < t, h * D, acc * scale, D)


@triton.jit
def _exact_key_gradient(
    q, k, v, is_close, full, log_total, d_out, d_k, d_v,
    q_valid, k_valid, segment,
    scale, t, s, h, n,
    q_batch, q_token, q_head, q_channel, k_batch, k_token, k_head, k_channel,
    v_batch, v_token, v_head, v_channel,
    o_batch, o_token, o_head, o_channel,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile, batch, kv = longest_first(tl.cdiv(s, ROWS), n, CAUSAL)
    if tl.load(is_close + batch * n + kv) != 0:
        return
    keys = tile * ROWS + tl.arange(0, ROWS)
    is_key = is_token(k_valid, batch, keys, s)
    k_tile = load_tile(
        k + batch * k_batch + kv * k_head, keys, is_key, k_token, k_channel, D, PADDED_D
    ).to(tl.float32)
    v += batch * v_batch + kv * v_head

    key_acc = tl.zeros((ROWS, PADDED_D), tl.float32)
    begin, end = queries_met(tile * ROWS, ROWS, batch, t, s, segment, CAUSAL)
    group = h // n
    head_start = batch * s * n + kv
    for first in range(0, E, CHANNELS):
        channels = first + tl.arange(0, CHANNELS)
        is_element = is_key[:, None] & (channels < E)[None, :]
        v_tile = tl.load(
            addresses(v, keys, v_token, channels, v_channel), mask=is_element, other=0.0
        ).to(tl.float32)
        value_acc = tl.zeros((ROWS, CHANNELS), tl.float32)
        for member in range(0, group):
            head = kv * group + member
            q_start = q + batch * q_batch + head * q_head
            o_start = full + (batch * t * h + head) * E
            d_start = d_out + batch * o_batch + head * o_head
            for i in range(begin, end):
                row = i + tl.arange(0, 1)
                is_row = is_token(q_valid, batch, row, t)
                q_row = load_tile(q_start, row, is_row, q_token, q_channel, D, PADDED_D).to(
                    tl.float32
                )
                at = (batch * h + head) * t + row[None, :]
                logs = tl.load(log_total + at, mask=is_row[None, :], other=float("inf"))
                is_part = is_row[:, None] & (channels < E)[None, :]
                o = tl.load(addresses(o_start, row, h * E, channels, 1), mask=is_part, other=0.0)
                d_o = tl.load(
                    addresses(d_start, row, o_token, channels, o_channel), mask=is_part, other=0.0
                ).to(tl.float32)
                score = tl.sum(k_tile * q_row, 1, keep_dims=True) * scale
                mask = may_attend(
                    row[None, :],
                    keys[:, None],
                    is_key[:, None],
                    batch,
                    t,
                    s,
                    segment,
                    CAUSAL,
                )
                log_a = tl.where(mask, score - logs, float("-inf"))
                weighted = d_o * tl.exp(log_a + (v_tile - o))
                value_acc += weighted
                share = tl.exp(log_a) * tl.sum(d_o, 1, keep_dims=True)
                key_acc += (tl.sum(weighted, 1, keep_dims=True) - share) * q_row
        at = addresses(d_v + head_start * E, keys, n * E, channels, 1)
        is_stored = (keys < s)[:, None] & (channels < E)[None, :]
        tl.store(at, value_acc.to(d_v.dtype.element_ty), mask=is_stored)
    store_tile(d_k + head_start * D, keys, keys < s, n * D, key_acc * scale, D)


# ------------------------------------------------------------------------------------- launch


def laser_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    masks: KernelMasks,
    value_range: ValueSpread,
    full: torch.Tensor,
    log_total: torch.Tensor,
    d_out: torch.Tensor,
    *,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv, in the shapes and dtypes of the inputs; o (float32) and λ are from forward."""
    b, t, h, d = q.shape
    s, n, e = v.shape[1:]
    d_q, d_k, d_v = (x.new_empty(x.shape) for x in (q, k, v))
    sizes = scale, t, s, h, n
    fixed = {"CAUSAL": causal, "D": d, "E": e, "PADDED_D": padded_width(d)}

    w = weights(v, masks, value_range)
    g, d_sum = _cotangents(d_out, masks, value_range, full, log_total)
    rows = value_range.less, value_range.is_close, g, d_sum, log_total
    if is_wide(v, d):
        wide_backward(q, k, w, rows, (d_q, d_k, d_v), masks, scale=scale, causal=causal)
    else:
        for name, kernel, gradients, tokens, heads in (
            ("laser_query_gradient", _query_gradient, (d_q,), t, h),
            ("laser_key_gradient", _key_gradient, (d_k, d_v), s, n),
        ):
            tuned = configured(name, q, v)
            launch(
                kernel, (cdiv(tokens, tuned.rows) * b * heads,),
                q, k, w, *rows, *gradients,
                *masks, *sizes, *q.stride(), *k.stride(),
                **fixed, PADDED_E=padded_width(e), ROWS=tuned.rows, COLUMNS=tuned.columns,
                PRECISION=product_precision(v.dtype), num_warps=tuned.warps,
                num_stages=tuned.stages,
            )  # fmt: skip

    for name, kernel, gradients, tokens, heads in (
        ("laser_exact_query_gradient", _exact_query_gradient, (d_q,), t, h),
        ("laser_exact_key_gradient", _exact_key_gradient, (d_k, d_v), s, n),
    ):
        tuned = exact_configuration(name, q, v)
        launch(
            kernel, (cdiv(tokens, tuned.rows) * b * heads,),
            q, k, v, value_range.is_close, full, log_total, d_out, *gradients,
            *masks, *sizes, *q.stride(), *k.stride(), *v.stride(), *d_out.stride(),
            **fixed, CHANNELS=exact_channels(e), ROWS=tuned.rows,
            num_warps=tuned.warps, num_stages=tuned.stages,
        )  # fmt: skip
    return d_q, d_k, d_v


def _cotangents(
    d_out: torch.Tensor,
    masks: KernelMasks,
    value_range: ValueSpread,
    full: torch.Tensor,
    log_total: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """G (b, t, h, e) and D' (b, h, t) of the close heads."""
    b, t, h, e = d_out.shape
    g = d_out.new_empty(d_out.shape, dtype=factor_dtype(d_out.dtype))
    d_sum = torch.empty_like(log_total)
    rows = COTANGENT_ELEMENTS // padded_width(e)
    launch(
        _cotangent, (cdiv(t, rows) * b * h,),
        d_out, full, log_total, *value_range, g, d_sum, masks.q_valid,
        t, h, value_range.is_close.shape[1], *d_out.stride(),
        E=e, PADDED_E=padded_width(e), ROWS=rows,
    )  # fmt: skip
    return g, d_sum
