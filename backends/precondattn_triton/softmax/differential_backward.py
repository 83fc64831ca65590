"""Differential attention backward, from o, o₂, the log-sum-exps λ_m of both maps and do:

    A_m = e^{S_m − λ_m},    dA = do vᵀ,    D₂ = rowsum(do ∘ o₂),    D₁ = rowsum(do ∘ o) + λ D₂,
    dS₁ = A₁ ∘ (dA − D₁),    dS₂ = −λ A₂ ∘ (dA − D₂),    dv = (A₁ − λ A₂)ᵀ do,
    dq_m = s G_m k_m,    dk_m = s G_mᵀ q_m,    G_m = dS_m ∘ (slope of the cap),    dλ = −D₂,
    dm = −Σ_ij |i − j| (dS₁ + dS₂)_ij,
    dσ = −Σ_i (e^{σ − λ₁} D₁ − λ e^{σ − λ₂} D₂)_i.

A_m is recomputed from λ_m. dA is one product for both maps, and so is dv. Kernels and their grids:

    query gradient    dq₁, dq₂, sums for dm   one program per tile of queries, head and sequence
    key gradient      dk₁, dk₂, dv            one program per tile of keys, kv head and sequence

If values have more than 256 channels (`channel_parts.py`), the key gradient is launched twice, for
dk and for the parts of dv. The query gradient sums do vᵀ over parts, of 64 channels in float32. A
program of the key gradient loops over the query heads of its group. No two programs add to the same
element, so the result is deterministic. Products per head, half of them if causal: t s (4 d + e)
and t s (4 d + 2 e).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from precondattn_triton.launching import cdiv, launch
from precondattn_triton.softmax.channel_parts import WIDEST_PART, load_part, store_part
from precondattn_triton.softmax.differential_forward import DifferentialCall, Maps, row_weights
from precondattn_triton.softmax.reach import (
    is_within,
    keys_in_reach,
    keys_of,
    queries_in_reach,
    queries_of,
)
from precondattn_triton.softmax.score_options import distances, scores_and_slopes
from precondattn_triton.softmax.score_tiles import load_logs
from precondattn_triton.softmax.visits import is_visited, visited, visits
from precondattn_triton.tiles import factor_dtype, is_token, load_tile, store_tile, tile_of_program


class DifferentialGradients(NamedTuple):
    """The gradients of a call."""

    maps: Maps
    v: torch.Tensor
    slopes: torch.Tensor | None
    """(h,), float32"""


@triton.jit
def _query_gradient(
    q1, k1, q2, k2, v, lam, sink, d_out, logs, d_sums, d_q1, d_q2, d_slopes,
    g_batch, g_token, g_head, g_channel,
    q_valid, k_valid, segment,
    softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
    scale, t, s, h, n, logs_map,
    q1_batch, q1_token, q1_head, q1_channel, k1_batch, k1_token, k1_head, k1_channel,
    q2_batch, q2_token, q2_head, q2_channel, k2_batch, k2_token, k2_head, k2_channel,
    v_batch, v_token, v_head, v_channel, l_batch, l_token, l_head,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    tile, batch, head = tile_of_program(tl.cdiv(t, ROWS), h)
    kv = head // (h // n)
    rows = tile * ROWS + tl.arange(0, ROWS)
    at = (batch * h + head) * t
    is_row = is_token(q_valid, batch, rows, t)
    logs1 = load_logs(logs, at, rows, is_row)
    logs2 = load_logs(logs, at + logs_map, rows, is_row)
    is_row = is_row & (logs1 < float("inf"))
    sums1 = tl.load(d_sums + at + rows, mask=is_row, other=0.0)
    sums2 = tl.load(d_sums + logs_map + at + rows, mask=is_row, other=0.0)
    weight = row_weights(lam, batch, head, rows, is_row, l_batch, l_token, l_head)
    q1_tile = load_tile(
        q1 + batch * q1_batch + head * q1_head, rows, is_row, q1_token, q1_channel, D, PADDED_D
    )
    q2_tile = load_tile(
        q2 + batch * q2_batch + head * q2_head, rows, is_row, q2_token, q2_channel, D, PADDED_D
    )
    d_out += batch * g_batch + head * g_head
    if PARTS == 1:
        d_o = load_part(d_out, rows, is_row, g_token, g_channel, 0, E, CHANNELS).to(FACTOR)
    k1 += batch * k1_batch + kv * k1_head
    k2 += batch * k2_batch + kv * k2_head
    v += batch * v_batch + kv * v_head

    acc1 = tl.zeros((ROWS, PADDED_D), tl.float32)
    acc2 = tl.zeros((ROWS, PADDED_D), tl.float32)
    d_slope = tl.zeros((ROWS,), tl.float32)
    begin, low, high, end = keys_in_reach(
        tile * ROWS, ROWS, batch, t, s, segment, window, CAUSAL, COLUMNS
    )
    has_first: tl.constexpr = window is not None or segment is not None
    first_keys, last_keys = keys_of(rows[:, None], batch, t, s, segment, window, CAUSAL)
    # Two loops do not fit the registers in float32: all tiles are masked.
    IS_ONE_LOOP: tl.constexpr = EXACT or k_valid is not None
    if IS_ONE_LOOP:
        low, high = begin, begin
    for phase in tl.static_range(1 if IS_ONE_LOOP else 0, 2):
        begins, ends = visits(begin, low, high, end, phase)
        for visit in range(begins, ends, COLUMNS):
            columns = visited(visit, low, high, phase) + tl.arange(0, COLUMNS)
            is_key = is_visited(k_valid, batch, columns, s, phase == 0)
            is_pair = is_row[:, None] & is_key[None, :]
            k1_tile = load_tile(k1, columns, is_key, k1_token, k1_channel, D, PADDED_D)
            k2_tile = load_tile(k2, columns, is_key, k2_token, k2_channel, D, PADDED_D)
            d_a = tl.zeros((ROWS, COLUMNS), tl.float32)
            for first in tl.static_range(0, E, CHANNELS):
                values = load_part(v, columns, is_key, v_token, v_channel, first, E, CHANNELS)
                if PARTS > 1:
                    d_o = load_part(d_out, rows, is_row, g_token, g_channel, first, E, CHANNELS)
                    d_o = d_o.to(FACTOR)
                d_a = tl.dot(d_o, tl.trans(values.to(FACTOR)), d_a, input_precision=PRECISION)
            s1, slope1 = scores_and_slopes(
                tl.dot(q1_tile, tl.trans(k1_tile), input_precision=PRECISION),
                rows[:, None], columns[None, :], is_pair, batch, head, t, s, scale,
                softcap, bias, slopes, bias_batch, bias_head, bias_row, bias_column, EXACT,
                logs1[:, None],
            )  # fmt: skip
            s2, slope2 = scores_and_slopes(
                tl.dot(q2_tile, tl.trans(k2_tile), input_precision=PRECISION),
                rows[:, None], columns[None, :], is_pair, batch, head, t, s, scale,
                softcap, bias, slopes, bias_batch, bias_head, bias_row, bias_column, EXACT,
                logs2[:, None],
            )  # fmt: skip
            if phase == 1:
                mask = is_within(columns[None, :], first_keys, last_keys, has_first)
                if k_valid is not None:
                    mask &= is_key[None, :]
                s1 = tl.where(mask, s1, float("-inf"))
                s2 = tl.where(mask, s2, float("-inf"))
            d_s1 = tl.exp2(s1) * (d_a - sums1[:, None])
            d_s2 = tl.exp2(s2) * (d_a - sums2[:, None])  # Without the factor −λ of its row.
            if slopes is not None:
                apart = distances(rows[:, None], columns[None, :], t, s)
                d_slope += tl.sum((d_s1 - weight[:, None] * d_s2) * apart, 1)
            if softcap is not None:
                d_s1 *= slope1
                d_s2 *= slope2
            acc1 = tl.dot(d_s1.to(FACTOR), k1_tile.to(FACTOR), acc1, input_precision=PRECISION)
            acc2 = tl.dot(d_s2.to(FACTOR), k2_tile.to(FACTOR), acc2, input_precision=PRECISION)
    start = (batch * t * h + head) * D
    store_tile(d_q1 + start, rows, rows < t, h * D, acc1 * scale, D)
    store_tile(d_q2 + start, rows, rows < t, h * D, -acc2 * (weight * scale)[:, None], D)
    if slopes is not None:
        part = (batch * tl.cdiv(t, ROWS) + tile) * h + head
        tl.store(d_slopes + part, -tl.sum(d_slope, 0))


@triton.jit
def _key_gradient(
    q1, k1, q2, k2, v, lam, sink, d_out, logs, d_sums, d_k1, d_k2, d_v,
    g_batch, g_token, g_head, g_channel,
    q_valid, k_valid, segment,
    softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
    scale, t, s, h, n, logs_map,
    q1_batch, q1_token, q1_head, q1_channel, k1_batch, k1_token, k1_head, k1_channel,
    q2_batch, q2_token, q2_head, q2_channel, k2_batch, k2_token, k2_head, k2_channel,
    v_batch, v_token, v_head, v_channel, l_batch, l_token, l_head,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr, FACTOR: tl.constexpr,
    WITH_KEYS: tl.constexpr, WITH_VALUES: tl.constexpr,
):  # fmt: skip
    """dk₁ and dk₂ of a tile of keys, or a part of dv, or both if there is one part."""
    tiles = tl.cdiv(s, ROWS)
    if WITH_KEYS:
        tile, batch, kv = tile_of_program(tiles, n)
        part = 0
    else:
        tile_and_part, batch, kv = tile_of_program(tiles * PARTS, n)
        tile, part = tile_and_part % tiles, tile_and_part // tiles * CHANNELS
    if CAUSAL:  # The first tiles have the most work.
        tile = tiles - 1 - tile
    keys = tile * ROWS + tl.arange(0, ROWS)
    is_key = is_token(k_valid, batch, keys, s)
    k1 += batch * k1_batch + kv * k1_head
    k2 += batch * k2_batch + kv * k2_head
    v += batch * v_batch + kv * v_head
    k1_tile = load_tile(k1, keys, is_key, k1_token, k1_channel, D, PADDED_D)
    k2_tile = load_tile(k2, keys, is_key, k2_token, k2_channel, D, PADDED_D)
    if WITH_KEYS and PARTS == 1:
        values = load_part(v, keys, is_key, v_token, v_channel, 0, E, CHANNELS).to(FACTOR)

    if WITH_KEYS:
        acc1 = tl.zeros((ROWS, PADDED_D), tl.float32)
        acc2 = tl.zeros((ROWS, PADDED_D), tl.float32)
    if WITH_VALUES:
        value_acc = tl.zeros((ROWS, CHANNELS), tl.float32)
    begin, low, high, end = queries_in_reach(
        tile * ROWS, ROWS, batch, t, s, segment, window, CAUSAL, COLUMNS
    )
    # Two loops do not fit the registers in float32 or with wide values: all tiles are masked.
    IS_ONE_LOOP: tl.constexpr = EXACT or (WITH_KEYS and PARTS > 1)
    if IS_ONE_LOOP:
        low, high = begin, begin
    for phase in tl.static_range(1 if IS_ONE_LOOP else 0, 2):
        begins, ends = visits(begin, low, high, end, phase)
        if phase == 1:
            has_first: tl.constexpr = CAUSAL or window is not None or segment is not None
            first_queries, last_queries = queries_of(
                keys[:, None], batch, t, s, segment, window, CAUSAL
            )  # fmt: skip
        for member in range(0, h // n):
            head = kv * (h // n) + member
            at = (batch * h + head) * t
            q1_start = q1 + batch * q1_batch + head * q1_head
            q2_start = q2 + batch * q2_batch + head * q2_head
            g_start = d_out + batch * g_batch + head * g_head
            for visit in range(begins, ends, COLUMNS):
                queries = visited(visit, low, high, phase) + tl.arange(0, COLUMNS)
                is_query = is_visited(q_valid, batch, queries, t, phase == 0)
                logs1 = load_logs(logs, at, queries, is_query)
                logs2 = load_logs(logs, at + logs_map, queries, is_query)
                is_pair = is_query[None, :] & is_key[:, None]
                weight = row_weights(lam, batch, head, queries, is_query, l_batch, l_token, l_head)
                q1_tile = load_tile(
                    q1_start, queries, is_query, q1_token, q1_channel, D, PADDED_D
                )  # fmt: skip
                q2_tile = load_tile(
                    q2_start, queries, is_query, q2_token, q2_channel, D, PADDED_D
                )  # fmt: skip
                # Tiles are transposed: keys × queries.
                s1, slope1 = scores_and_slopes(
                    tl.dot(k1_tile, tl.trans(q1_tile), input_precision=PRECISION),
                    queries[None, :], keys[:, None], is_pair, batch, head, t, s, scale,
                    softcap, bias, slopes, bias_batch, bias_head, bias_row, bias_column, EXACT,
                    logs1[None, :],
                )  # fmt: skip
                s2, slope2 = scores_and_slopes(
                    tl.dot(k2_tile, tl.trans(q2_tile), input_precision=PRECISION),
                    queries[None, :], keys[:, None], is_pair, batch, head, t, s, scale,
                    softcap, bias, slopes, bias_batch, bias_head, bias_row, bias_column, EXACT,
                    logs2[None, :],
                )  # fmt: skip
                if phase == 1:
                    mask = is_within(queries[None, :], first_queries, last_queries, has_first)
                    s1 = tl.where(mask, s1, float("-inf"))
                    s2 = tl.where(mask, s2, float("-inf"))
                a1 = tl.exp2(s1)
                a2 = tl.exp2(s2) * weight[None, :]
                if WITH_VALUES:
                    d_o = load_part(
                        g_start, queries, is_query, g_token, g_channel, part, E, CHANNELS
                    ).to(FACTOR)  # fmt: skip
                    value_acc = tl.dot(
                        (a1 - a2).to(FACTOR), d_o, value_acc, input_precision=PRECISION
                    )  # fmt: skip
                if WITH_KEYS:
                    d_a = tl.zeros((ROWS, COLUMNS), tl.float32)
                    for first in tl.static_range(0, E, CHANNELS):
                        if PARTS > 1:
                            values = load_part(
                                v, keys, is_key, v_token, v_channel, first, E, CHANNELS
                            ).to(FACTOR)  # fmt: skip
                            d_o = load_part(
                                g_start, queries, is_query, g_token, g_channel, first, E, CHANNELS
                            ).to(FACTOR)  # fmt: skip
                        d_a = tl.dot(values, tl.trans(d_o), d_a, input_precision=PRECISION)
                    sums1 = tl.load(d_sums + at + queries, mask=is_query, other=0.0)
                    sums2 = tl.load(d_sums + logs_map + at + queries, mask=is_query, other=0.0)
                    d_s1 = a1 * (d_a - sums1[None, :])
                    d_s2 = a2 * (d_a - sums2[None, :])
                    if softcap is not None:
                        d_s1 *= slope1
                        d_s2 *= slope2
                    acc1 = tl.dot(
                        d_s1.to(FACTOR), q1_tile.to(FACTOR), acc1, input_precision=PRECISION
                    )  # fmt: skip
                    acc2 = tl.dot(
                        d_s2.to(FACTOR), q2_tile.to(FACTOR), acc2, input_precision=PRECISION
                    )  # fmt: skip
    is_kept = is_key[:, None]  # Invalid keys are not masked in the loops.
    start = batch * s * n + kv
    if WITH_KEYS:
        acc1 = tl.where(is_kept, acc1 * scale, 0.0)
        acc2 = tl.where(is_kept, -acc2 * scale, 0.0)
        store_tile(d_k1 + start * D, keys, keys < s, n * D, acc1, D)
        store_tile(d_k2 + start * D, keys, keys < s, n * D, acc2, D)
    if WITH_VALUES:
        value_acc = tl.where(is_kept, value_acc, 0.0)
        store_part(d_v + start * E, keys, keys < s, n * E, part, value_acc, E)


def differential_backward(
    call: DifferentialCall,
    logs: torch.Tensor,
    d_sums: torch.Tensor,
    d_out: torch.Tensor,
) -> DifferentialGradients:
    """`d_sums` (2, b, h, t) holds D₁ and D₂."""
    b, t, h, _ = call.maps.q1.shape
    s, n = call.v.shape[1:3]
    d_maps = Maps(*(torch.empty_like(x, memory_format=torch.contiguous_format) for x in call.maps))
    d_v = torch.empty_like(call.v, memory_format=torch.contiguous_format)
    inputs = *call.arrays, d_out, logs, d_sums
    sizes = *d_out.stride(), *call.sizes

    # Parts of do are loaded anew for each tile. All of do in registers, with factors of 32 bits,
    # would leave none for the loop.
    is_half = factor_dtype(call.v.dtype) == torch.bfloat16
    constants = call.constants("differential_query_gradient", WIDEST_PART if is_half else 64)
    tiles = cdiv(t, constants["ROWS"])
    d_slopes = None if call.options.slopes is None else logs.new_empty((b, tiles, h))
    launch(
        _query_gradient,
        (tiles * b * h,),
        *inputs,
        d_maps.q1,
        d_maps.q2,
        d_slopes,
        *sizes,
        **constants,
    )

    constants = call.constants("differential_key_gradient")
    tiles, parts = cdiv(s, constants["ROWS"]), constants["PARTS"]
    for with_keys, with_values in ((True, True),) if parts == 1 else ((True, False), (False, True)):
        launch(
            _key_gradient, (tiles * (1 if with_keys else parts) * b * n,),
            *inputs, d_maps.k1, d_maps.k2, d_v, *sizes,
            **constants, WITH_KEYS=with_keys, WITH_VALUES=with_values,
        )  # fmt: skip

    slopes = None if d_slopes is None else d_slopes.sum((0, 1))
    return DifferentialGradients(d_maps, d_v, slopes)
