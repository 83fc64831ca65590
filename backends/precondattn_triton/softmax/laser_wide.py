"""Close heads of LASER whose keys or values are wider than a tile, in parts of their channels.

The sums are those of `laser_forward.py` and `laser_backward.py`. Sums over channels are computed
CHUNK channels at a time,

    ⟨q_i, k_j⟩ = Σ_chunks ⟨q_i, k_j⟩,    (G Wᵀ)_ij = Σ_chunks ⟨G_i, W_j⟩,

and a program computes PART channels of its result, from scores that it recomputes:

    forward           o of a part, and λ         one program per part of values, tile of queries and
                                                 head
    query gradient    dq of a part               one program per part of keys, tile of queries and
                                                 head
    key gradient      dk and dv of a part        one program per part, tile of keys and kv head

With p parts of 256 channels (128, if factors have 32 bits), the FLOPs per head are 2 t s (p d + e),
2 t s (p d + p e + d) and 2 t s (p d + p e + d + e), half of them if causal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from precondattn_triton.configurations import Configuration, configuration
from precondattn_triton.launching import cdiv, launch
from precondattn_triton.precision import product_precision
from precondattn_triton.softmax.bias_tiles import store_pairs
from precondattn_triton.softmax.channel_parts import load_part, store_part
from precondattn_triton.softmax.laser_call import LaserCall
from precondattn_triton.softmax.laser_exact import slope_sums
from precondattn_triton.softmax.laser_values import log_mean_and_log
from precondattn_triton.softmax.reach import keys_in_reach, may_attend_within, queries_in_reach
from precondattn_triton.softmax.score_options import distances, scores_and_slopes
from precondattn_triton.softmax.score_tiles import load_logs, with_tile
from precondattn_triton.softmax.tile_order import longest_first
from precondattn_triton.tiles import factor_dtype, is_token


class ChannelParts(NamedTuple):
    """How channels are divided."""

    part: int
    """The channels of a result that a program computes"""
    chunk: int
    """The channels that a product sums over"""


PARTS = {torch.bfloat16: ChannelParts(256, 128), torch.float32: ChannelParts(128, 64)}
"""The parts for each dtype of the factors."""


@triton.jit
def _products(
    left, rows, is_row, left_token, left_channel,
    right, columns, is_column, right_token, right_channel,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """⟨left_i, right_j⟩ of two tiles of tokens, a chunk of channels at a time."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, WIDTH, CHUNK):
        i = load_part(left, rows, is_row, left_token, left_channel, first, WIDTH, CHUNK)
        j = load_part(right, columns, is_column, right_token, right_channel, first, WIDTH, CHUNK)
        total = tl.dot(i, tl.trans(j), total, input_precision=PRECISION)
    return total


@triton.jit
def gradient_of_pairs(
    left, left_values, i, is_i, i_token, i_channel, i_values,
    right, right_values, j, is_j, j_token, j_channel, j_values,
    row, column, is_key, logs, sums, batch, head, segment,
    softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
    scale, t, s, CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """A and dS of a tile of pairs (tokens i, tokens j), and the slopes of the cap.

    One of `left` and `right` are queries, with G as their values, the other keys, with W. Tokens of
    the values are `i_values` and `j_values` apart. The tokens `row` and `column`, `is_key`, λ in
    units of log 2 and D' broadcast to the tile.
    """
    scores, slope = scores_and_slopes(
        _products(
            left, i, is_i, i_token, i_channel, right, j, is_j, j_token, j_channel,
            D, CHUNK, ROWS, COLUMNS, PRECISION,
        ),
        row, column, is_i[:, None] & is_j[None, :], batch, head, t, s, scale,
        softcap, bias, slopes, bias_batch, bias_head, bias_row, bias_column, EXACT,
    )  # fmt: skip
    mask = may_attend_within(row, column, is_key, batch, t, s, segment, window, CAUSAL)
    a = tl.exp2(tl.where(mask, scores - logs, float("-inf")))
    d_a = _products(
        left_values, i, is_i, i_values, 1, right_values, j, is_j, j_values, 1,
        E, CHUNK, ROWS, COLUMNS, PRECISION,
    )  # fmt: skip
    return a, a * (d_a - sums), slope


@triton.jit
def _wide_close(
    q, k, w, shift, less, is_close, out, full, log_total,
    q_valid, k_valid, segment,
    softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
    scale, t, s, h, n,
    q_batch, q_token, q_head, q_channel, k_batch, k_token, k_head, k_channel,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(t, ROWS)
    rank, batch, head = longest_first(tiles * PARTS, h, CAUSAL)
    tile, part = tiles - 1 - rank // PARTS, rank % PARTS
    kv = head // (h // n)
    if tl.load(is_close + batch * n + kv) == 0:
        return
    rows = tile * ROWS + tl.arange(0, ROWS)
    is_row = is_token(q_valid, batch, rows, t)
    q += batch * q_batch + head * q_head
    k += batch * k_batch + kv * k_head
    w += (batch * n + kv) * s * E

    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, PART), tl.float32)
    begin, _low, _high, end = keys_in_reach(
        tile * ROWS, ROWS, batch, t, s, segment, window, CAUSAL, COLUMNS
    )
    for start in range(begin, end, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        is_key = is_token(k_valid, batch, columns, s)
        scores, _slope = scores_and_slopes(
            _products(
                q, rows, is_row, q_token, q_channel, k, columns, is_key, k_token, k_channel,
                D, CHUNK, ROWS, COLUMNS, PRECISION,
            ),
            rows[:, None], columns[None, :], is_row[:, None] & is_key[None, :],
            batch, head, t, s, scale,
            softcap, bias, slopes, bias_batch, bias_head, bias_row, bias_column, EXACT,
        )  # fmt: skip
        mask = may_attend_within(
            rows[:, None], columns[None, :], is_key[None, :], batch, t, s, segment, window, CAUSAL
        )
        scores = tl.where(mask, scores, float("-inf"))
        w_tile = load_part(w, columns, columns < s, E, 1, part * PART, E, PART)
        largest, total, acc = with_tile(largest, total, acc, scores, w_tile, PRECISION)

    o, logs = log_mean_and_log(
        largest, total, acc, is_row, shift, less, batch * n + kv, part * PART, E, PART
    )
    tl.store(log_total + (batch * h + head) * t + rows, logs, mask=(rows < t) & (part == 0))
    start = (batch * t * h + head) * E
    store_part(out + start, rows, rows < t, h * E, part * PART, o, E)
    if full is not None:
        store_part(full + start, rows, rows < t, h * E, part * PART, o, E)


@triton.jit
def _wide_query_gradient(
    q, k, w, less, is_close, g, d_sum, log_total, d_q, d_slopes, d_bias,
    q_valid, k_valid, segment,
    softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
    scale, t, s, h, n,
    q_batch, q_token, q_head, q_channel, k_batch, k_token, k_head, k_channel,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(t, ROWS)
    rank, batch, head = longest_first(tiles * PARTS, h, CAUSAL)
    tile, part = tiles - 1 - rank // PARTS, rank % PARTS
    kv = head // (h // n)
    if tl.load(is_close + batch * n + kv) == 0:
        return
    rows = tile * ROWS + tl.arange(0, ROWS)
    is_row = is_token(q_valid, batch, rows, t)
    q += batch * q_batch + head * q_head
    k += batch * k_batch + kv * k_head
    w += (batch * n + kv) * s * E
    g += (batch * t * h + head) * E
    at = (batch * h + head) * t
    logs = load_logs(log_total, at, rows, is_row)
    sums = tl.load(d_sum + at + rows, mask=is_row, other=0.0)

    acc = tl.zeros((ROWS, PART), tl.float32)
    d_slope = tl.zeros((ROWS,), tl.float32)
    begin, _low, _high, end = keys_in_reach(
        tile * ROWS, ROWS, batch, t, s, segment, window, CAUSAL, COLUMNS
    )
    for start in range(begin, end, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        is_key = is_token(k_valid, batch, columns, s)
        _a, d_scores, slope = gradient_of_pairs(
            q, g, rows, is_row, q_token, q_channel, h * E,
            k, w, columns, is_key, k_token, k_channel, E,
            rows[:, None], columns[None, :], is_key[None, :], logs[:, None], sums[:, None],
            batch, head, segment,
            softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
            scale, t, s, CAUSAL, D, E, CHUNK, ROWS, COLUMNS, PRECISION, EXACT,
        )  # fmt: skip
        if slopes is not None:
            d_slope += tl.sum(d_scores * distances(rows[:, None], columns[None, :], t, s), 1)
        if d_bias is not None:
            is_stored = (rows < t) & (part == 0)
            store_pairs(d_bias, at, rows, columns, s, is_stored, columns < s, d_scores)
        if softcap is not None:
            d_scores *= slope
        d_scores = d_scores.to(w.dtype.element_ty)
        k_tile = load_part(k, columns, is_key, k_token, k_channel, part * PART, D, PART)
        acc = tl.dot(d_scores, k_tile.to(w.dtype.element_ty), acc, input_precision=PRECISION)
    start = (batch * t * h + head) * D
    store_part(d_q + start, rows, rows < t, h * D, part * PART, acc * scale, D)
    if slopes is not None:
        program = (batch * tiles + tile) * h + head
        tl.store(d_slopes + program, -tl.sum(d_slope, 0), mask=part == 0)


@triton.jit
def _wide_key_gradient(
    q, k, w, less, is_close, g, d_sum, log_total, d_k, d_v,
    q_valid, k_valid, segment,
    softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
    scale, t, s, h, n,
    q_batch, q_token, q_head, q_channel, k_batch, k_token, k_head, k_channel,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    rank, batch, kv = longest_first(tl.cdiv(s, ROWS) * PARTS, n, CAUSAL)
    tile, part = rank // PARTS, rank % PARTS
    if tl.load(is_close + batch * n + kv) == 0:
        return
    keys = tile * ROWS + tl.arange(0, ROWS)
    is_key = is_token(k_valid, batch, keys, s)
    k += batch * k_batch + kv * k_head
    w += (batch * n + kv) * s * E

    key_acc = tl.zeros((ROWS, PART), tl.float32)
    weight_acc = tl.zeros((ROWS, PART), tl.float32)
    begin, _low, _high, end = queries_in_reach(
        tile * ROWS, ROWS, batch, t, s, segment, window, CAUSAL, COLUMNS
    )
    group = h // n
    for member in range(0, group):
        head = kv * group + member
        q_start = q + batch * q_batch + head * q_head
        g_start = g + (batch * t * h + head) * E
        at = (batch * h + head) * t
        for start in range(begin, end, COLUMNS):
            queries = start + tl.arange(0, COLUMNS)
            is_query = is_token(q_valid, batch, queries, t)
            logs = load_logs(log_total, at, queries, is_query)
            sums = tl.load(d_sum + at + queries, mask=is_query, other=0.0)
            # Tiles are transposed: keys × queries.
            a, d_scores, slope = gradient_of_pairs(
                k, w, keys, is_key, k_token, k_channel, E,
                q_start, g_start, queries, is_query, q_token, q_channel, h * E,
                queries[None, :], keys[:, None], is_key[:, None], logs[None, :], sums[None, :],
                batch, head, segment,
                softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
                scale, t, s, CAUSAL, D, E, CHUNK, ROWS, COLUMNS, PRECISION, EXACT,
            )  # fmt: skip
            g_tile = load_part(g_start, queries, is_query, h * E, 1, part * PART, E, PART)
            weight_acc = tl.dot(
                a.to(w.dtype.element_ty), g_tile, weight_acc, input_precision=PRECISION
            )
            if softcap is not None:
                d_scores *= slope
            d_scores = d_scores.to(w.dtype.element_ty)
            q_tile = load_part(q_start, queries, is_query, q_token, q_channel, part * PART, D, PART)
            key_acc = tl.dot(
                d_scores, q_tile.to(w.dtype.element_ty), key_acc, input_precision=PRECISION
            )
    head_start = batch * s * n + kv
    store_part(d_k + head_start * D, keys, keys < s, n * D, part * PART, key_acc * scale, D)
    w_tile = load_part(w, keys, keys < s, E, 1, part * PART, E, PART).to(tl.float32)
    channels = part * PART + tl.arange(0, PART)
    u = tl.load(less + (batch * n + kv) * E + channels, mask=channels < E, other=0.0)
    d_values = weight_acc * (w_tile + u[None, :])
    store_part(d_v + head_start * E, keys, keys < s, n * E, part * PART, d_values, E)


# ------------------------------------------------------------------------------------- launch


def wide_forward(
    call: LaserCall,
    w: torch.Tensor,
    value_range: tuple[torch.Tensor, ...],
    outputs: tuple[torch.Tensor | None, ...],
) -> None:
    """Writes o (b, t, h, e), o in float32 or None, and λ (b, h, t) of the close heads."""
    arrays, width = (*value_range, *outputs), w.shape[3]
    _launch("laser_wide_forward", _wide_close, call, w, arrays, width, False)


def wide_backward(
    call: LaserCall,
    w: torch.Tensor,
    rows: tuple[torch.Tensor, ...],
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    d_bias: torch.Tensor | None,
) -> torch.Tensor | None:
    """Writes dq, dk and dv of the close heads, and dbias if each head of each sequence has its own;
    returns the sums of slopes (b, tiles, h). `rows` are u, is_close, G, D' and λ."""
    d_q, d_k, d_v = gradients
    d, e = call.q.shape[3], w.shape[3]
    d_slopes = slope_sums(call, _configuration("laser_wide_query_gradient", call))
    for name, kernel, results, width, by_key in (
        ("laser_wide_query_gradient", _wide_query_gradient, (d_q, d_slopes, d_bias), d, False),
        ("laser_wide_key_gradient", _wide_key_gradient, (d_k, d_v), max(d, e), True),
    ):
        _launch(name, kernel, call, w, (*rows, *results), width, by_key)
    return d_slopes


def _configuration(name: str, call: LaserCall) -> Configuration:
    part = PARTS[factor_dtype(call.v.dtype)].part
    return configuration(name, part, call.has_half_factors, call.v)


def _launch(
    name: str,
    kernel: triton.runtime.JITFunction,
    call: LaserCall,
    w: torch.Tensor,
    arrays: tuple[torch.Tensor | None, ...],
    width: int,
    by_key: bool,
) -> None:
    """A grid of the parts of `width` channels, tiles of queries or keys, and heads."""
    (b, t, h, _), (s, n) = call.q.shape, call.k.shape[1:3]
    part, chunk = PARTS[factor_dtype(call.v.dtype)]
    parts = cdiv(width, part)
    tuned = _configuration(name, call)
    tiles = cdiv(s, tuned.rows) * n if by_key else cdiv(t, tuned.rows) * h
    launch(
        kernel, (tiles * parts * b,),
        call.q, call.k, w, *arrays, *call.arguments,
        **call.constants, PARTS=parts, PART=part, CHUNK=chunk,
        ROWS=tuned.rows, COLUMNS=tuned.columns, PRECISION=product_precision(call.v.dtype),
        EXACT=call.is_exact, num_warps=tuned.warps, num_stages=tuned.stages,
    )  # fmt: skip
