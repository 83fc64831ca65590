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

t s e exponentials per head forward, and 2 t s e for each of the two gradients; half of them if
causal. S is that of `score_options.py`. A program of a close head returns at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precondattn_triton.configurations import Configuration, configuration
from precondattn_triton.launching import cdiv, launch
from precondattn_triton.softmax.channel_parts import load_part, store_part
from precondattn_triton.softmax.laser_call import LaserCall
from precondattn_triton.softmax.reach import keys_in_reach, may_attend_within, queries_in_reach
from precondattn_triton.softmax.score_options import distances, scores_and_slopes
from precondattn_triton.softmax.tile_order import longest_first
from precondattn_triton.tiles import LOG2_E, is_token, load_tile, store_tile, tile_of_program

EXACT_CHANNELS = 64
"""The largest number of channels of a program."""


@triton.jit
def _log_weights(
    products, row, column, is_row, is_key, logs, batch, head, segment,
    softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
    scale, t, s, CAUSAL: tl.constexpr,
):  # fmt: skip
    """S − λ of pairs from ⟨q, k⟩, −∞ where masked, and the slopes of the cap.

    They are those of `scores_and_slopes`, in natural logarithms. `logs` is λ, or 0.
    """
    slope = 1.0
    if (softcap is None and bias is None) and slopes is None:
        scores = products * scale
    else:
        scores, slope = scores_and_slopes(
            products, row, column, is_row & is_key, batch, head, t, s, scale,
            softcap, bias, slopes, bias_batch, bias_head, bias_row, bias_column, True,
        )  # fmt: skip
        scores = scores / LOG2_E
    mask = may_attend_within(row, column, is_key, batch, t, s, segment, window, CAUSAL)
    return tl.where(mask, scores - logs, float("-inf")), slope


@triton.jit
def _log_weights_of_key(
    q_tile, k, v, logs, j, first, rows, is_row, batch, head,
    k_valid, segment,
    softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
    scale, t, s, k_token, k_channel, v_token, v_channel,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """S − λ and the slope of the cap (rows, 1) for key j; the key (1, d); its values from channel
    `first` on (1, channels)."""
    column = j + tl.arange(0, 1)
    is_key = is_token(k_valid, batch, column, s)
    k_row = load_tile(k, column, is_key, k_token, k_channel, D, PADDED_D).to(tl.float32)
    v_row = load_part(v, column, is_key, v_token, v_channel, first, E, CHANNELS).to(tl.float32)
    log_weights, slope = _log_weights(
        tl.sum(q_tile * k_row, 1, keep_dims=True), rows[:, None], column[None, :],
        is_row[:, None], is_key[None, :], logs, batch, head, segment,
        softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
        scale, t, s, CAUSAL,
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
    q, k, v, is_close, out, full, log_total,
    q_valid, k_valid, segment,
    softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
    scale, t, s, h, n,
    q_batch, q_token, q_head, q_channel, k_batch, k_token, k_head, k_channel,
    v_batch, v_token, v_head, v_channel,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(t, ROWS)
    part_and_tile, batch, head = tile_of_program(tiles * tl.cdiv(E, CHANNELS), h)
    tile, part = part_and_tile % tiles, part_and_tile // tiles
    kv = head // (h // n)
    if tl.load(is_close + batch * n + kv) != 0:
        return
    rows = tile * ROWS + tl.arange(0, ROWS)
    is_row = is_token(q_valid, batch, rows, t)
    q_tile = load_tile(
        q + batch * q_batch + head * q_head, rows, is_row, q_token, q_channel, D, PADDED_D
    ).to(tl.float32)
    k += batch * k_batch + kv * k_head
    first = part * CHANNELS
    v += batch * v_batch + kv * v_head

    highest_score = tl.full((ROWS, 1), float("-inf"), tl.float32)
    total = tl.zeros((ROWS, 1), tl.float32)
    highest = tl.full((ROWS, CHANNELS), float("-inf"), tl.float32)
    acc = tl.zeros((ROWS, CHANNELS), tl.float32)
    begin, _low, _high, end = keys_in_reach(
        tile * ROWS, ROWS, batch, t, s, segment, window, CAUSAL, 1
    )
    for j in range(begin, end):
        score, _slope, _k_row, v_row = _log_weights_of_key(
            q_tile, k, v, 0.0, j, first, rows, is_row, batch, head,
            k_valid, segment,
            softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
            scale, t, s, k_token, k_channel, v_token, v_channel,
            CAUSAL, D, E, PADDED_D, CHANNELS,
        )  # fmt: skip
        highest_score, total = _with_term(highest_score, total, score)
        highest, acc = _with_term(highest, acc, score + v_row)

    has_keys = is_row[:, None] & (total != 0)
    logs = tl.where(has_keys, highest_score + tl.log(tl.where(has_keys, total, 1.0)), float("inf"))
    o = tl.where(has_keys, highest + tl.log(tl.where(has_keys, acc, 1.0)) - logs, 0.0)
    at = (batch * h + head) * t + rows[:, None]
    tl.store(log_total + at, logs, mask=(rows < t)[:, None] & (part == 0))
    start = (batch * t * h + head) * E
    store_part(out + start, rows, rows < t, h * E, first, o, E)
    if full is not None:
        store_part(full + start, rows, rows < t, h * E, first, o, E)


@triton.jit
def _gradients_of_pairs(log_a, v, o, d_o, sums):
    """do ∘ w (pairs, channels), and its part of dS = Σ_c do_ic (w_ijc − a_ij) (pairs, 1)."""
    weighted = d_o * tl.exp(log_a + (v - o))
    return weighted, tl.sum(weighted, 1, keep_dims=True) - tl.exp(log_a) * sums


@triton.jit
def score_gradient_of_key(
    q_tile, k, v, o, d_o, sums, logs, j, first, rows, is_row, batch, head,
    k_valid, segment,
    softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
    scale, t, s, k_token, k_channel, v_token, v_channel,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The part of dS (rows, 1) for key j that is a sum over the channels of o and do, which begin
    at `first`; the slope of the cap; and the key (1, d)."""
    log_a, slope, k_row, v_row = _log_weights_of_key(
        q_tile, k, v, logs, j, first, rows, is_row, batch, head,
        k_valid, segment,
        softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
        scale, t, s, k_token, k_channel, v_token, v_channel,
        CAUSAL, D, E, PADDED_D, CHANNELS,
    )  # fmt: skip
    _weighted, d_score = _gradients_of_pairs(log_a, v_row, o, d_o, sums)
    return d_score, slope, k_row


@triton.jit
def rows_of_exact_head(
    full, d_out, rows, is_row, first, h, o_token, o_channel,
    E: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """o and do of a head from channel `first` on (rows, channels), float32, 0 in rows that are not
    valid; rowsum(do)."""
    o = load_part(full, rows, is_row, h * E, 1, first, E, CHANNELS)
    d_o = load_part(d_out, rows, is_row, o_token, o_channel, first, E, CHANNELS).to(tl.float32)
    return o, d_o, tl.sum(d_o, 1, keep_dims=True)


@triton.jit
def _exact_query_gradient(
    q, k, v, is_close, full, log_total, d_out, d_q, d_slopes,
    q_valid, k_valid, segment,
    softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
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
    d_slope = tl.zeros((ROWS, 1), tl.float32)
    begin, _low, _high, end = keys_in_reach(
        tile * ROWS, ROWS, batch, t, s, segment, window, CAUSAL, 1
    )
    # Each block of channels adds its part of ds.
    for first in range(0, E, CHANNELS):
        o, d_o, sums = rows_of_exact_head(
            full, d_out, rows, is_row, first, h, o_token, o_channel, E, CHANNELS
        )
        for j in range(begin, end):
            d_score, slope, k_row = score_gradient_of_key(
                q_tile, k, v, o, d_o, sums, logs, j, first, rows, is_row, batch, head,
                k_valid, segment,
                softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
                scale, t, s, k_token, k_channel, v_token, v_channel,
                CAUSAL, D, E, PADDED_D, CHANNELS,
            )  # fmt: skip
            if slopes is not None:
                d_slope += d_score * distances(rows[:, None], j, t, s)
            if softcap is not None:
                d_score *= slope
            acc += d_score * k_row
    start = (batch * t * h + head) * D
    store_tile(d_q + start, rows, rows < t, h * D, acc * scale, D)
    if slopes is not None:
        tl.store(d_slopes + (batch * tiles + tile) * h + head, -tl.sum(tl.sum(d_slope, 1), 0))


@triton.jit
def _exact_key_gradient(
    q, k, v, is_close, full, log_total, d_out, d_k, d_v,
    q_valid, k_valid, segment,
    softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
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
    begin, _low, _high, end = queries_in_reach(
        tile * ROWS, ROWS, batch, t, s, segment, window, CAUSAL, 1
    )
    group = h // n
    head_start = batch * s * n + kv
    for first in range(0, E, CHANNELS):
        v_tile = load_part(v, keys, is_key, v_token, v_channel, first, E, CHANNELS).to(tl.float32)
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
                o, d_o, sums = rows_of_exact_head(
                    o_start, d_start, row, is_row, first, h, o_token, o_channel, E, CHANNELS
                )
                log_a, slope = _log_weights(
                    tl.sum(k_tile * q_row, 1, keep_dims=True), row[None, :], keys[:, None],
                    is_row[None, :], is_key[:, None], logs, batch, head, segment,
                    softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
                    scale, t, s, CAUSAL,
                )  # fmt: skip
                weighted, d_score = _gradients_of_pairs(log_a, v_tile, o, d_o, sums)
                value_acc += weighted
                if softcap is not None:
                    d_score *= slope
                key_acc += d_score * q_row
        store_part(d_v + head_start * E, keys, keys < s, n * E, first, value_acc, E)
    store_tile(d_k + head_start * D, keys, keys < s, n * D, key_acc * scale, D)


# ------------------------------------------------------------------------------------- launch


def exact_forward(
    call: LaserCall, is_close: torch.Tensor, outputs: tuple[torch.Tensor | None, ...]
) -> None:
    """Writes o (b, t, h, e), o in float32 or None, and λ (b, h, t) of the exact heads."""
    b, t, h, _ = call.q.shape
    tuned, channels = exact_configuration("laser_exact_forward", call), exact_channels(call)
    launch(
        _exact, (cdiv(t, tuned.rows) * cdiv(call.v.shape[3], channels) * b * h,),
        call.q, call.k, call.v, is_close, *outputs, *call.arguments, *call.v.stride(),
        **call.constants, PADDED_D=call.padded_key, CHANNELS=channels, ROWS=tuned.rows,
        num_warps=tuned.warps, num_stages=tuned.stages,
    )  # fmt: skip


def exact_backward(
    call: LaserCall,
    from_forward: tuple[torch.Tensor, ...],
    d_out: torch.Tensor,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor | None:
    """Writes dq, dk and dv of the exact heads, and returns the sums of slopes (b, tiles, h).

    `from_forward` are is_close, o in float32 and λ.
    """
    (b, t, h, _), (s, n) = call.q.shape, call.k.shape[1:3]
    d_q, d_k, d_v = gradients
    tuned = exact_configuration("laser_exact_query_gradient", call)
    d_slopes = slope_sums(call, tuned)
    for name, kernel, results, tokens, heads in (
        ("laser_exact_query_gradient", _exact_query_gradient, (d_q, d_slopes), t, h),
        ("laser_exact_key_gradient", _exact_key_gradient, (d_k, d_v), s, n),
    ):
        tuned = exact_configuration(name, call)
        launch(
            kernel, (cdiv(tokens, tuned.rows) * b * heads,),
            call.q, call.k, call.v, *from_forward, d_out, *results,
            *call.arguments, *call.v.stride(), *d_out.stride(),
            **call.constants, PADDED_D=call.padded_key, CHANNELS=exact_channels(call),
            ROWS=tuned.rows, num_warps=tuned.warps, num_stages=tuned.stages,
        )  # fmt: skip
    return d_slopes


def slope_sums(call: LaserCall, tuned: Configuration) -> torch.Tensor | None:
    """Zeros for the sums (b, tiles, h) of a query gradient that slopes get; heads of the other kind
    leave them."""
    (b, t, h, _), slopes = call.q.shape, call.options.slopes
    if slopes is None:
        return None
    return slopes.new_zeros((b, cdiv(t, tuned.rows), h), dtype=torch.float32)


def exact_configuration(kernel: str, call: LaserCall) -> Configuration:
    """The configuration of a kernel for exact heads, which reads values in parts."""
    return configuration(kernel, call.padded_key, call.has_half_factors, call.v)


def exact_channels(call: LaserCall) -> int:
    """Channels in a tile of a kernel for exact heads."""
    return min(call.padded_value, EXACT_CHANNELS)
