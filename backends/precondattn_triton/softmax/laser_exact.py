"""Exact heads of LASER, whose values are too far apart for one shift: a key or a query at a time.

Forward, with a running maximum M_ic of S_ij + v_jc for each row and channel,

    M' = max(M, S + v),    acc ← acc e^{M − M'} + e^{S + v − M'},    o = M + log acc − λ,

so that a masked key does not affect an output at all. Backward, with D_i = Σ_c do_ic,

    w_ijc = e^{S_ij − λ_i + v_jc − o_ic},    a_ij = e^{S_ij − λ_i},
    dv_jc = Σ_i do_ic w_ijc,    dS_ij = Σ_c do_ic w_ijc − a_ij D_i,

for one key (dq) or one query (dk and dv) at a time, and a block of channels. Grids:

    forward           o and λ                   one program per part of channels, tile of queries
                                                and head
    query gradient    dq, sums of slopes        one program per tile of queries and head
    key gradient      dk, dv                    one program per tile of keys and kv head
    bias gradient     dbias                     one program per tile of pairs of a bias

A bias gradient is added to what close heads with the same bias have. t s e exponentials per head
forward, and 2 t s e for each gradient; half of them if causal. S is that of
`score_options.py`. A program of a close head returns at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precondattn.kernel_backend.limits import padded_width
from precondattn_triton.configurations import configuration
from precondattn_triton.launching import Constant, cdiv, launch
from precondattn_triton.softmax.reach import (
    keys_in_reach,
    may_attend_within,
    queries_in_reach,
    tokens_again,
)
from precondattn_triton.softmax.score_options import distances, scores_and_slopes
from precondattn_triton.softmax.softmax_forward import AttentionCall, AttentionResults
from precondattn_triton.softmax.tile_order import (
    bias_tile_of_program,
    keys_of_program,
    rows_of_program,
)
from precondattn_triton.tiles import (
    LOG2_E,
    heads,
    is_token,
    load_channels,
    start_of,
    store_channels,
)

EXACT_CHANNELS = 64
"""The largest number of channels of a program."""


@triton.jit
def _log_weights(
    products, row, column, is_row, is_key, logs, batch, head,
    masks, scoring, sizes, CAUSAL: tl.constexpr,
):  # fmt: skip
    """S − λ of pairs from ⟨q, k⟩, −∞ where masked, and the slopes of the cap.

    They are those of `scores_and_slopes`, in natural logarithms. `logs` is λ, or 0.
    """
    slope = 1.0
    if (scoring.softcap is None and scoring.bias is None) and scoring.slopes is None:
        scores = products * sizes.scale
    else:
        scores, slope = scores_and_slopes(
            products, row, column, is_row & is_key, batch, head,
            sizes.t, sizes.s, sizes.scale, scoring, True,
        )  # fmt: skip
        scores = scores / LOG2_E
    mask = may_attend_within(row, column, is_key, batch, masks, scoring, sizes, CAUSAL)
    return tl.where(mask, scores - logs, float("-inf")), slope


@triton.jit
def _log_weights_of_key(
    q_tile, k, k_start, v, v_start, logs, j, first, rows, is_row, batch, head,
    masks, scoring, sizes, CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """S − λ and the slope of the cap (rows, 1) for key j; the key (1, d); its values from channel
    `first` on (1, channels)."""
    column = j + tl.arange(0, 1)
    is_key = is_token(masks.k_valid, batch, column, sizes.s)
    k_row = load_channels(k, k_start, column, is_key, D, PADDED_D).to(tl.float32)
    v_row = load_channels(v, v_start, column, is_key, E, CHANNELS, first).to(tl.float32)
    log_weights, slope = _log_weights(
        tl.sum(q_tile * k_row, 1, keep_dims=True), rows[:, None], column[None, :],
        is_row[:, None], is_key[None, :], logs, batch, head, masks, scoring, sizes, CAUSAL,
    )  # fmt: skip
    return log_weights, slope, k_row, v_row


@triton.jit
def _with_term(largest, total, term):
    """M' and the sum of e^{x − M'}, with one more x; −∞ adds nothing."""
    is_higher = term > largest
    smaller = tl.where(term == float("-inf"), 0.0, tl.exp(-tl.abs(largest - term)))
    total = tl.where(is_higher, total * smaller + 1.0, total + smaller)
    return tl.maximum(largest, term), total


@triton.jit
def _exact(
    q, k, v, is_close, out, full, log_total, masks, scoring, sizes,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile, part, batch, head, kv, rows, is_row = rows_of_program(
        masks, sizes, CAUSAL, ROWS, (E + CHANNELS - 1) // CHANNELS
    )
    if tl.load(is_close + batch * sizes.n + kv) != 0:
        return
    first = part * CHANNELS
    q_tile = load_channels(q, start_of(q, batch, head), rows, is_row, D, PADDED_D).to(tl.float32)
    k_start, v_start = start_of(k, batch, kv), start_of(v, batch, kv)

    highest_score = tl.full((ROWS, 1), float("-inf"), tl.float32)
    total = tl.zeros((ROWS, 1), tl.float32)
    highest = tl.full((ROWS, CHANNELS), float("-inf"), tl.float32)
    acc = tl.zeros((ROWS, CHANNELS), tl.float32)
    begin, _low, _high, end = keys_in_reach(
        tile * ROWS, ROWS, batch, masks, scoring, sizes, CAUSAL, 1
    )
    for j in range(begin, end):
        score, _slope, _k_row, v_row = _log_weights_of_key(
            q_tile, k, k_start, v, v_start, 0.0, j, first, rows, is_row, batch, head,
            masks, scoring, sizes, CAUSAL, D, E, PADDED_D, CHANNELS,
        )  # fmt: skip
        highest_score, total = _with_term(highest_score, total, score)
        highest, acc = _with_term(highest, acc, score + v_row)

    has_keys = is_row[:, None] & (total != 0)
    logs = tl.where(has_keys, highest_score + tl.log(tl.where(has_keys, total, 1.0)), float("inf"))
    o = tl.where(has_keys, highest + tl.log(tl.where(has_keys, acc, 1.0)) - logs, 0.0)
    at = (batch * sizes.h + head) * sizes.t + rows[:, None]
    is_stored = rows < sizes.t
    tl.store(log_total + at, logs, mask=is_stored[:, None] & (part == 0))
    start, step = (batch * sizes.t * sizes.h + head) * E, sizes.h * E
    store_channels(out + start, rows, is_stored, step, o, E, first)
    if full is not None:
        store_channels(full + start, rows, is_stored, step, o, E, first)


@triton.jit
def _gradients_of_pairs(log_a, v, o, d_o, sums):
    """do ∘ w (pairs, channels), and its part of dS = Σ_c do_ic (w_ijc − a_ij) (pairs, 1)."""
    weighted = d_o * tl.exp(log_a + (v - o))
    return weighted, tl.sum(weighted, 1, keep_dims=True) - tl.exp(log_a) * sums


@triton.jit
def _score_gradient_of_key(
    q_tile, k, k_start, v, v_start, o, d_o, sums, logs, j, first, rows, is_row, batch, head,
    masks, scoring, sizes, CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The part of dS (rows, 1) for key j that is a sum over the channels of o and do, which begin
    at `first`; the slope of the cap; and the key (1, d)."""
    log_a, slope, k_row, v_row = _log_weights_of_key(
        q_tile, k, k_start, v, v_start, logs, j, first, rows, is_row, batch, head,
        masks, scoring, sizes, CAUSAL, D, E, PADDED_D, CHANNELS,
    )  # fmt: skip
    _weighted, d_score = _gradients_of_pairs(log_a, v_row, o, d_o, sums)
    return d_score, slope, k_row


@triton.jit
def _outputs_of_head(
    full, d_out, batch, head, rows, is_row, first, E: tl.constexpr, CHANNELS: tl.constexpr
):
    """o and do of a head from channel `first` on (rows, channels), float32, 0 in rows that are not
    valid; rowsum(do)."""
    o = load_channels(full, start_of(full, batch, head), rows, is_row, E, CHANNELS, first)
    d_o = load_channels(d_out, start_of(d_out, batch, head), rows, is_row, E, CHANNELS, first)
    d_o = d_o.to(tl.float32)
    return o, d_o, tl.sum(d_o, 1, keep_dims=True)


@triton.jit
def _exact_query_gradient(
    q, k, v, d_out, full, is_close, log_total, d_q, d_slopes, masks, scoring, sizes,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile, _part, batch, head, kv, rows, is_row = rows_of_program(masks, sizes, CAUSAL, ROWS)
    if tl.load(is_close + batch * sizes.n + kv) != 0:
        return
    q_tile = load_channels(q, start_of(q, batch, head), rows, is_row, D, PADDED_D).to(tl.float32)
    at = (batch * sizes.h + head) * sizes.t + rows[:, None]
    logs = tl.load(log_total + at, mask=is_row[:, None], other=float("inf"))
    k_start, v_start = start_of(k, batch, kv), start_of(v, batch, kv)

    acc = tl.zeros((ROWS, PADDED_D), tl.float32)
    d_slope = tl.zeros((ROWS, 1), tl.float32)
    begin, _low, _high, end = keys_in_reach(
        tile * ROWS, ROWS, batch, masks, scoring, sizes, CAUSAL, 1
    )
    # Each block of channels adds its part of ds.
    for first in range(0, E, CHANNELS):
        o, d_o, sums = _outputs_of_head(full, d_out, batch, head, rows, is_row, first, E, CHANNELS)
        for j in range(begin, end):
            d_score, slope, k_row = _score_gradient_of_key(
                q_tile, k, k_start, v, v_start, o, d_o, sums, logs, j, first, rows, is_row,
                batch, head, masks, scoring, sizes, CAUSAL, D, E, PADDED_D, CHANNELS,
            )  # fmt: skip
            if scoring.slopes is not None:
                d_slope += d_score * distances(rows[:, None], j, sizes.t, sizes.s)
            if scoring.softcap is not None:
                d_score *= slope
            acc += d_score * k_row
    start = (batch * sizes.t * sizes.h + head) * D
    store_channels(d_q + start, rows, rows < sizes.t, sizes.h * D, acc * sizes.scale, D)
    if scoring.slopes is not None:
        sum_of_program = (batch * tl.cdiv(sizes.t, ROWS) + tile) * sizes.h + head
        tl.store(d_slopes + sum_of_program, -tl.sum(tl.sum(d_slope, 1), 0))


@triton.jit
def _exact_key_gradient(
    q, k, v, d_out, full, is_close, log_total, d_k, d_v, masks, scoring, sizes,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile, _part, batch, kv, keys, is_key = keys_of_program(masks, sizes, CAUSAL, ROWS)
    if tl.load(is_close + batch * sizes.n + kv) != 0:
        return
    k_tile = load_channels(k, start_of(k, batch, kv), keys, is_key, D, PADDED_D).to(tl.float32)
    v_start = start_of(v, batch, kv)

    key_acc = tl.zeros((ROWS, PADDED_D), tl.float32)
    begin, _low, _high, end = queries_in_reach(
        tile * ROWS, ROWS, batch, masks, scoring, sizes, CAUSAL, 1
    )
    group = sizes.h // sizes.n
    is_present, start = keys < sizes.s, batch * sizes.s * sizes.n + kv
    for first in range(0, E, CHANNELS):
        v_tile = load_channels(v, v_start, keys, is_key, E, CHANNELS, first).to(tl.float32)
        value_acc = tl.zeros((ROWS, CHANNELS), tl.float32)
        for member in range(0, group):
            head = kv * group + member
            q_start = start_of(q, batch, head)
            for i in range(begin, end):
                row = i + tl.arange(0, 1)
                is_row = is_token(masks.q_valid, batch, row, sizes.t)
                q_row = load_channels(q, q_start, row, is_row, D, PADDED_D).to(tl.float32)
                at = (batch * sizes.h + head) * sizes.t + row[None, :]
                logs = tl.load(log_total + at, mask=is_row[None, :], other=float("inf"))
                o, d_o, sums = _outputs_of_head(
                    full, d_out, batch, head, row, is_row, first, E, CHANNELS
                )
                log_a, slope = _log_weights(
                    tl.sum(k_tile * q_row, 1, keep_dims=True), row[None, :], keys[:, None],
                    is_row[None, :], is_key[:, None], logs, batch, head,
                    masks, scoring, sizes, CAUSAL,
                )  # fmt: skip
                weighted, d_score = _gradients_of_pairs(log_a, v_tile, o, d_o, sums)
                value_acc += weighted
                if scoring.softcap is not None:
                    d_score *= slope
                key_acc += d_score * q_row
        store_channels(d_v + start * E, keys, is_present, sizes.n * E, value_acc, E, first)
    store_channels(d_k + start * D, keys, is_present, sizes.n * D, key_acc * sizes.scale, D)


@triton.jit
def _exact_bias_gradient(
    q, k, v, d_out, full, is_close, log_total, d_bias, batches, sharing, masks, scoring, sizes,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`batches` sequences and `sharing` heads share an entry of the bias."""
    tile, start, first_batch, first_head = bias_tile_of_program(
        sizes.t, sizes.s, sizes.h // sharing, ROWS, COLUMNS
    )
    rows = tile * ROWS + tl.arange(0, ROWS)
    columns = start + tl.arange(0, COLUMNS)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for number in range(0, batches * sharing):
        batch, head = first_batch + number // sharing, first_head + number % sharing
        kv = head // (sizes.h // sizes.n)
        begin, _low, _high, end = keys_in_reach(
            tile * ROWS, ROWS, batch, masks, scoring, sizes, CAUSAL, COLUMNS
        )
        is_met = (start >= begin) & (start < end)
        if is_met & (tl.load(is_close + batch * sizes.n + kv) == 0):
            is_row = is_token(masks.q_valid, batch, rows, sizes.t)
            q_tile = load_channels(q, start_of(q, batch, head), rows, is_row, D, PADDED_D)
            q_tile = q_tile.to(tl.float32)
            at = (batch * sizes.h + head) * sizes.t + rows[:, None]
            logs = tl.load(log_total + at, mask=is_row[:, None], other=float("inf"))
            for first in range(0, E, CHANNELS):
                o, d_o, sums = _outputs_of_head(
                    full, d_out, batch, head, rows, is_row, first, E, CHANNELS
                )
                for j in range(start, tl.minimum(start + COLUMNS, end)):
                    d_score, _slope, _k_row = _score_gradient_of_key(
                        q_tile, k, start_of(k, batch, kv), v, start_of(v, batch, kv),
                        o, d_o, sums, logs, j, first, rows, is_row,
                        batch, head, masks, scoring, sizes, CAUSAL, D, E, PADDED_D, CHANNELS,
                    )  # fmt: skip
                    acc += tl.where(columns[None, :] == j, d_score, 0.0)
    rows, columns = tokens_again(tile, ROWS), start + tl.arange(0, COLUMNS)
    row = (first_batch * (sizes.h // sharing) + first_head) * sizes.t + rows
    is_pair = (rows < sizes.t)[:, None] & (columns < sizes.s)[None, :]
    at = d_bias + row[:, None] * sizes.s + columns[None, :]
    acc += tl.load(at, mask=is_pair, other=0.0).to(tl.float32)
    tl.store(at, acc.to(d_bias.dtype.element_ty), mask=is_pair)


# ------------------------------------------------------------------------------------- launch


def exact_forward(call: AttentionCall, is_close: torch.Tensor, results: AttentionResults) -> None:
    """Writes o and λ of the exact heads; `call` has the values themselves."""
    b, t, h, _ = call.q.shape
    constants = _constants(call, "forward")
    parts = cdiv(call.v.shape[3], constants["CHANNELS"])
    full = None if results.full is results.out else results.full
    launch(
        _exact, (cdiv(t, constants["ROWS"]) * parts * b * h,),
        heads(call.q), heads(call.k), heads(call.v), is_close, results.out, full, results.logs,
        *call.arguments, **constants,
    )  # fmt: skip


def exact_backward(
    call: AttentionCall,
    is_close: torch.Tensor,
    full: torch.Tensor,
    logs: torch.Tensor,
    d_out: torch.Tensor,
    gradients: dict[str, torch.Tensor],
) -> None:
    """Writes dq, dk and dv of the exact heads, and adds their parts of the other gradients.

    `full` is o in float32, and `logs` is λ.
    """
    (b, t, h, _), (s, n) = call.q.shape, call.k.shape[1:3]
    inputs = heads(call.q), heads(call.k), heads(call.v), heads(d_out), heads(full), is_close, logs
    constants = _constants(call, "query_gradient")
    tiles = cdiv(t, constants["ROWS"])
    d_slopes = None if call.options.slopes is None else logs.new_zeros((b, tiles, h))
    launch(
        _exact_query_gradient, (tiles * b * h,),
        *inputs, gradients["q"], d_slopes, *call.arguments, **constants,
    )  # fmt: skip
    if d_slopes is not None:
        gradients["slopes"] += d_slopes.sum((0, 1))
    constants = _constants(call, "key_gradient")
    launch(
        _exact_key_gradient, (cdiv(s, constants["ROWS"]) * b * n,),
        *inputs, gradients["k"], gradients["v"], *call.arguments, **constants,
    )  # fmt: skip
    if call.options.bias is not None:
        d_bias = gradients["bias"]
        constants = _constants(call, "bias_gradient")
        pairs = cdiv(t, constants["ROWS"]) * cdiv(s, constants["COLUMNS"])
        launch(
            _exact_bias_gradient, (pairs * d_bias.shape[0] * d_bias.shape[1],),
            *inputs, d_bias, b // d_bias.shape[0], h // d_bias.shape[1],
            *call.arguments, **constants,
        )  # fmt: skip


def _constants(call: AttentionCall, kernel: str) -> dict[str, Constant]:
    """The constants and options of a kernel for exact heads, which reads values in parts."""
    d, e = call.q.shape[3], call.v.shape[3]
    name = f"laser_exact_{kernel}"
    tuned = configuration(name, padded_width(d), call.has_half_factors, call.v)
    columns = {"COLUMNS": tuned.columns} if kernel == "bias_gradient" else {}
    return {
        "CAUSAL": call.causal,
        "D": d,
        "E": e,
        "PADDED_D": padded_width(d),
        "CHANNELS": min(padded_width(e), EXACT_CHANNELS),
        "ROWS": tuned.rows,
        **columns,
        "num_warps": tuned.warps,
        "num_stages": tuned.stages,
    }
