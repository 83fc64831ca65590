"""LASER backward, from o, λ and the output's gradient do, with D_i = Σ_c do_ic:

    w_ijc = e^{S_ij − λ_i + v_jc − o_ic},    a_ij = e^{S_ij − λ_i},
    dv_jc = Σ_i do_ic w_ijc,    dS_ij = Σ_c do_ic w_ijc − a_ij D_i,
    dq = scale F k,    dk = scale Fᵀ q,    F = dS ∘ (slope of the cap),
    dbias = dS,    dm = −Σ_ij |i − j| dS_ij.

Weights are recomputed from λ. In close heads (see `laser_values.py`) this is the gradient of flash
attention with the values W = e^{v − ν} − u,

    G = do ∘ e^{ν − o},    dW = Aᵀ G,    dv = (W + u) ∘ dW,    dS = A ∘ (G Wᵀ − D'),
    D'_i = Σ_c G_ic (e^{o_ic − ν_c} − u_c),

where D' also uses the rounded G: then rounding scales the part of each channel in dS, and Σ_j dS_ij
stays 0. In exact heads the sums are computed directly (`laser_exact.py`).

Kernels, in order, and their grids:

    cotangent               G (b, t, h, e) and D'    one program per tile of queries and head
    query gradient          dq of close heads        one program per tile of queries and head
    key gradient            dk, dv of close heads    one program per tile of keys and kv head
    exact query gradient    dq of other heads        one program per tile of queries and head
    exact key gradient      dk, dv of other heads    one program per tile of keys and kv head
    bias gradient           dbias (`laser_bias.py`)  one program per tile of pairs of a bias

A program of a key gradient loops over the query heads of its group. No two programs add to the same
element, so the result is deterministic. It visits the inner tiles of all heads before those at a
border (`visits.py`). A query gradient sums |i − j| dS_ij over its tile, and stores dS as dbias
if no other head or sequence has the same bias. FLOPs per close head, half of them if causal: dq
2 t s (2 d + e), dk and dv 2 t s (2 d + 2 e).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precondattn.kernel_backend.limits import padded_width
from precondattn_triton.launching import cdiv, launch
from precondattn_triton.precision import product_precision
from precondattn_triton.softmax.bias_tiles import store_pairs
from precondattn_triton.softmax.laser_bias import bias_gradient
from precondattn_triton.softmax.laser_call import LaserCall
from precondattn_triton.softmax.laser_exact import exact_backward, slope_sums
from precondattn_triton.softmax.laser_values import ValueSpread, shifts, weights
from precondattn_triton.softmax.laser_wide import wide_backward
from precondattn_triton.softmax.reach import keys_in_reach, may_attend_within, queries_in_reach
from precondattn_triton.softmax.score_options import distances, scores_and_slopes
from precondattn_triton.softmax.tile_order import longest_first
from precondattn_triton.softmax.visits import load_visited, tokens_again, visited, visits
from precondattn_triton.tiles import (
    LOG2_E,
    KernelMasks,
    factor_dtype,
    is_token,
    load_tile,
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
    nu, u = shifts(shift, less, batch * n + kv, 0, E, PADDED_E)
    above = tl.where(has_keys[:, None], nu[None, :] - o, 0.0) * LOG2_E
    rounded = (d_o * tl.exp2(above)).to(g.dtype.element_ty)
    sums = tl.sum(rounded.to(tl.float32) * (tl.exp2(-above) - u[None, :]), 1)
    store_tile(g + start, rows, rows < t, h * E, rounded, E)
    tl.store(d_sum + (batch * h + head) * t + rows, sums, mask=rows < t)


@triton.jit
def _query_gradient(
    q, k, w, less, is_close, g, d_sum, log_total, d_q, d_slopes, d_bias,
    q_valid, k_valid, segment,
    softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
    scale, t, s, h, n,
    q_batch, q_token, q_head, q_channel, k_batch, k_token, k_head, k_channel,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
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
    d_slope = tl.zeros((ROWS,), tl.float32)
    begin, low, high, end = keys_in_reach(
        tile * ROWS, ROWS, batch, t, s, segment, window, CAUSAL, COLUMNS
    )
    IS_PLAIN: tl.constexpr = (softcap is None and bias is None) and slopes is None
    # Two loops with options in float32 spill registers.
    IS_ONE_LOOP: tl.constexpr = EXACT and not IS_PLAIN
    if IS_ONE_LOOP:
        low, high = begin, begin
    for phase in tl.static_range(1 if IS_ONE_LOOP else 0, 2):
        first, last = visits(begin, low, high, end, phase)
        for visit in range(first, last, COLUMNS):
            columns = visited(visit, low, high, phase) + tl.arange(0, COLUMNS)
            k_tile = load_visited(
                k, k_valid, batch, columns, s, k_token, k_channel, D, PADDED_D, phase == 0
            )
            w_tile = load_visited(w, None, batch, columns, s, E, 1, E, PADDED_E, phase == 0)
            is_key = is_token(k_valid, batch, columns, s)
            scores, slope = scores_and_slopes(
                tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION),
                rows[:, None], columns[None, :], is_row[:, None] & is_key[None, :],
                batch, head, t, s, scale,
                softcap, bias, slopes, bias_batch, bias_head, bias_row, bias_column, EXACT,
            )  # fmt: skip
            scores = scores - logs[:, None]
            if phase == 1 or k_valid is not None:
                mask = is_key[None, :]
                if phase == 1:
                    mask = may_attend_within(
                        rows[:, None], columns[None, :], mask, batch, t, s, segment, window, CAUSAL
                    )
                scores = tl.where(mask, scores, float("-inf"))
            d_a = tl.dot(g_tile, tl.trans(w_tile), input_precision=PRECISION)
            d_scores = tl.exp2(scores) * (d_a - sums[:, None])
            if slopes is not None:
                d_slope += tl.sum(d_scores * distances(rows[:, None], columns[None, :], t, s), 1)
            if d_bias is not None:
                first_row = (batch * h + head) * t
                store_pairs(d_bias, first_row, rows, columns, s, rows < t, columns < s, d_scores)
            if softcap is not None:
                d_scores *= slope
            d_scores = d_scores.to(w.dtype.element_ty)
            acc = tl.dot(d_scores, k_tile.to(w.dtype.element_ty), acc, input_precision=PRECISION)
    rows = tokens_again(tile, ROWS)
    start = (batch * t * h + head) * D
    store_tile(d_q + start, rows, rows < t, h * D, acc * scale, D)
    if slopes is not None:
        tl.store(d_slopes + (batch * tiles + tile) * h + head, -tl.sum(d_slope, 0))


@triton.jit
def _key_gradient(
    q, k, w, less, is_close, g, d_sum, log_total, d_k, d_v,
    q_valid, k_valid, segment,
    softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
    scale, t, s, h, n,
    q_batch, q_token, q_head, q_channel, k_batch, k_token, k_head, k_channel,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
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
    begin, low, high, end = queries_in_reach(
        tile * ROWS, ROWS, batch, t, s, segment, window, CAUSAL, COLUMNS
    )
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
                # Tiles are transposed: keys × queries.
                is_query = is_token(q_valid, batch, queries, t)
                scores, slope = scores_and_slopes(
                    tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION),
                    queries[None, :], keys[:, None], is_query[None, :] & is_key[:, None],
                    batch, head, t, s, scale,
                    softcap, bias, slopes, bias_batch, bias_head, bias_row, bias_column, EXACT,
                )  # fmt: skip
                scores = scores - (logs * LOG2_E)[None, :]
                if phase == 1:
                    mask = may_attend_within(
                        queries[None, :], keys[:, None], (keys < s)[:, None], batch,
                        t, s, segment, window, CAUSAL,
                    )  # fmt: skip
                    scores = tl.where(mask, scores, float("-inf"))
                a = tl.exp2(scores)
                weight_acc = tl.dot(
                    a.to(w.dtype.element_ty), g_tile, weight_acc, input_precision=PRECISION
                )
                d_a = tl.dot(w_tile, tl.trans(g_tile), input_precision=PRECISION)
                d_scores = a * (d_a - sums[None, :])
                if softcap is not None:
                    d_scores *= slope
                d_scores = d_scores.to(w.dtype.element_ty)
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


# ------------------------------------------------------------------------------------- launch


def laser_backward(
    call: LaserCall,
    bias: torch.Tensor | None,
    value_range: ValueSpread,
    full: torch.Tensor,
    log_total: torch.Tensor,
    d_out: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """The gradients of all inputs; o (float32) and λ are from forward.

    `bias` is the input (b or 1, h or 1, t, s).
    """
    (b, t, h, _), (s, n), v = call.q.shape, call.k.shape[1:3], call.v
    d_q, d_k, d_v = (x.new_empty(x.shape) for x in (call.q, call.k, v))
    gradients = {"q": d_q, "k": d_k, "v": d_v}
    is_own = bias is not None and bias.shape[:2] == (b, h)
    if bias is not None:
        gradients["bias"] = bias.new_zeros(bias.shape) if is_own else bias.new_empty(bias.shape)
    d_bias = gradients["bias"] if is_own else None

    w = weights(v, call.masks, value_range)
    g, d_sum = _cotangents(d_out, call.masks, value_range, full, log_total)
    rows = value_range.less, value_range.is_close, g, d_sum, log_total
    if call.is_wide:
        of_close = wide_backward(call, w, rows, (d_q, d_k, d_v), d_bias)
    else:
        of_close = slope_sums(call, call.configured("query_gradient"))
        for name, kernel, results, tokens, heads in (
            ("query_gradient", _query_gradient, (d_q, of_close, d_bias), t, h),
            ("key_gradient", _key_gradient, (d_k, d_v), s, n),
        ):
            tuned = call.configured(name)
            launch(
                kernel, (cdiv(tokens, tuned.rows) * b * heads,),
                call.q, call.k, w, *rows, *results, *call.arguments,
                **call.constants, PADDED_D=call.padded_key, PADDED_E=call.padded_value,
                ROWS=tuned.rows, COLUMNS=tuned.columns,
                PRECISION=product_precision(v.dtype), EXACT=call.is_exact,
                num_warps=tuned.warps, num_stages=tuned.stages,
            )  # fmt: skip

    from_forward = value_range.is_close, full, log_total
    of_exact = exact_backward(call, from_forward, d_out, (d_q, d_k, d_v))
    if of_close is not None and of_exact is not None:
        gradients["slopes"] = of_close.sum((0, 1)) + of_exact.sum((0, 1))
    if bias is not None:
        bias_gradient(call, w, (g, d_sum), from_forward, d_out, gradients["bias"])
    return gradients


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
