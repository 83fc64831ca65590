"""Differential attention backward, from o, o₂, the log-sum-exps λ_m of both maps and do:

    A_m = e^{S_m − λ_m},    dA = do vᵀ,    D₂ = rowsum(do ∘ o₂),    D₁ = rowsum(do ∘ o) + λ D₂,
    dS₁ = A₁ ∘ (dA − D₁),    dS₂ = −λ A₂ ∘ (dA − D₂),    dv = (A₁ − λ A₂)ᵀ do,
    dq_m = s dS_m k_m,    dk_m = s dS_mᵀ q_m,    dλ = −D₂.

A_m is recomputed from λ_m. dA is one product for both maps, and so is dv. Kernels and their grids:

    query gradient    dq₁, dq₂        one program per tile of queries, head and sequence
    key gradient      dk₁, dk₂, dv    one program per tile of keys, kv head and sequence

A program of the key gradient loops over the query heads of its group. No two programs add to the
same element, so the result is deterministic. Products per head, half of them if causal:
t s (4 d + e) and t s (4 d + 2 e).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precondattn.kernel_backend.limits import padded_width
from precondattn_triton.precision import product_precision
from precondattn_triton.softmax.differential_forward import Maps, row_weights, triton_dtype
from precondattn_triton.softmax.score_tiles import load_logs
from precondattn_triton.tiles import (
    LOG2_E,
    KernelMasks,
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


@triton.jit
def _query_gradient(
    q1, k1, q2, k2, v, lam, d_out, logs, d_sums, d_q1, d_q2,
    q_valid, k_valid, segment,
    scale, t, s, h, n, logs_map,
    q1_batch, q1_token, q1_head, q1_channel, k1_batch, k1_token, k1_head, k1_channel,
    q2_batch, q2_token, q2_head, q2_channel, k2_batch, k2_token, k2_head, k2_channel,
    v_batch, v_token, v_head, v_channel, l_batch, l_token, l_head,
    g_batch, g_token, g_head, g_channel,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, FACTOR: tl.constexpr,
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
    d_o = load_tile(
        d_out + batch * g_batch + head * g_head, rows, is_row, g_token, g_channel, E, PADDED_E
    ).to(FACTOR)
    k1 += batch * k1_batch + kv * k1_head
    k2 += batch * k2_batch + kv * k2_head
    v += batch * v_batch + kv * v_head

    acc1 = tl.zeros((ROWS, PADDED_D), tl.float32)
    acc2 = tl.zeros((ROWS, PADDED_D), tl.float32)
    begin, end = keys_met(tile * ROWS, ROWS, batch, t, s, segment, CAUSAL)
    for start in range(begin // COLUMNS * COLUMNS, end, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        is_key = is_token(k_valid, batch, columns, s)
        k1_tile = load_tile(k1, columns, is_key, k1_token, k1_channel, D, PADDED_D)
        k2_tile = load_tile(k2, columns, is_key, k2_token, k2_channel, D, PADDED_D)
        values = load_tile(v, columns, is_key, v_token, v_channel, E, PADDED_E).to(FACTOR)
        mask = may_attend(
            rows[:, None], columns[None, :], is_key[None, :], batch, t, s,
            segment, CAUSAL,
        )  # fmt: skip
        d_a = tl.dot(d_o, tl.trans(values), input_precision=PRECISION)
        s1 = tl.dot(q1_tile, tl.trans(k1_tile), input_precision=PRECISION) * (scale * LOG2_E)
        a1 = tl.exp2(tl.where(mask, s1 - logs1[:, None], float("-inf")))
        d_s1 = (a1 * (d_a - sums1[:, None])).to(FACTOR)
        acc1 = tl.dot(d_s1, k1_tile.to(FACTOR), acc1, input_precision=PRECISION)
        s2 = tl.dot(q2_tile, tl.trans(k2_tile), input_precision=PRECISION) * (scale * LOG2_E)
        a2 = tl.exp2(tl.where(mask, s2 - logs2[:, None], float("-inf")))
        d_s2 = (a2 * (d_a - sums2[:, None])).to(FACTOR)
        acc2 = tl.dot(d_s2, k2_tile.to(FACTOR), acc2, input_precision=PRECISION)
    start = (batch * t * h + head) * D
    store_tile(d_q1 + start, rows, rows < t, h * D, acc1 * scale, D)
    store_tile(d_q2 + start, rows, rows < t, h * D, -acc2 * (weight * scale)[:, None], D)


@triton.jit
def _key_gradient(
    q1, k1, q2, k2, v, lam, d_out, logs, d_sums, d_k1, d_k2, d_v,
    q_valid, k_valid, segment,
    scale, t, s, h, n, logs_map,
    q1_batch, q1_token, q1_head, q1_channel, k1_batch, k1_token, k1_head, k1_channel,
    q2_batch, q2_token, q2_head, q2_channel, k2_batch, k2_token, k2_head, k2_channel,
    v_batch, v_token, v_head, v_channel, l_batch, l_token, l_head,
    g_batch, g_token, g_head, g_channel,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    tile, batch, kv = tile_of_program(tl.cdiv(s, ROWS), n)
    keys = tile * ROWS + tl.arange(0, ROWS)
    is_key = is_token(k_valid, batch, keys, s)
    k1 += batch * k1_batch + kv * k1_head
    k2 += batch * k2_batch + kv * k2_head
    v += batch * v_batch + kv * v_head
    k1_tile = load_tile(k1, keys, is_key, k1_token, k1_channel, D, PADDED_D)
    k2_tile = load_tile(k2, keys, is_key, k2_token, k2_channel, D, PADDED_D)
    values = load_tile(v, keys, is_key, v_token, v_channel, E, PADDED_E).to(FACTOR)

    acc1 = tl.zeros((ROWS, PADDED_D), tl.float32)
    acc2 = tl.zeros((ROWS, PADDED_D), tl.float32)
    value_acc = tl.zeros((ROWS, PADDED_E), tl.float32)
    begin, end = queries_met(tile * ROWS, ROWS, batch, t, s, segment, CAUSAL)
    for member in range(0, h // n):
        head = kv * (h // n) + member
        at = (batch * h + head) * t
        for start in range(begin // COLUMNS * COLUMNS, end, COLUMNS):
            queries = start + tl.arange(0, COLUMNS)
            is_query = is_token(q_valid, batch, queries, t)
            logs1 = load_logs(logs, at, queries, is_query)
            logs2 = load_logs(logs, at + logs_map, queries, is_query)
            is_query = is_query & (logs1 < float("inf"))
            sums1 = tl.load(d_sums + at + queries, mask=is_query, other=0.0)
            sums2 = tl.load(d_sums + logs_map + at + queries, mask=is_query, other=0.0)
            weight = row_weights(lam, batch, head, queries, is_query, l_batch, l_token, l_head)
            q1_tile = load_tile(
                q1 + batch * q1_batch + head * q1_head,
                queries, is_query, q1_token, q1_channel, D, PADDED_D,
            )  # fmt: skip
            q2_tile = load_tile(
                q2 + batch * q2_batch + head * q2_head,
                queries, is_query, q2_token, q2_channel, D, PADDED_D,
            )  # fmt: skip
            d_o = load_tile(
                d_out + batch * g_batch + head * g_head,
                queries, is_query, g_token, g_channel, E, PADDED_E,
            ).to(FACTOR)  # fmt: skip
            # All transposed: keys × queries.
            mask = may_attend(
                queries[None, :], keys[:, None], is_key[:, None], batch, t, s,
                segment, CAUSAL,
            )  # fmt: skip
            s1 = tl.dot(k1_tile, tl.trans(q1_tile), input_precision=PRECISION) * (scale * LOG2_E)
            a1 = tl.exp2(tl.where(mask, s1 - logs1[None, :], float("-inf")))
            s2 = tl.dot(k2_tile, tl.trans(q2_tile), input_precision=PRECISION) * (scale * LOG2_E)
            a2 = tl.exp2(tl.where(mask, s2 - logs2[None, :], float("-inf"))) * weight[None, :]
            value_acc = tl.dot((a1 - a2).to(FACTOR), d_o, value_acc, input_precision=PRECISION)
            d_a = tl.dot(values, tl.trans(d_o), input_precision=PRECISION)
            d_s1 = (a1 * (d_a - sums1[None, :])).to(FACTOR)
            acc1 = tl.dot(d_s1, q1_tile.to(FACTOR), acc1, input_precision=PRECISION)
            d_s2 = (a2 * (d_a - sums2[None, :])).to(FACTOR)
            acc2 = tl.dot(d_s2, q2_tile.to(FACTOR), acc2, input_precision=PRECISION)
    head_start = batch * s * n + kv
    store_tile(d_k1 + head_start * D, keys, keys < s, n * D, acc1 * scale, D)
    store_tile(d_k2 + head_start * D, keys, keys < s, n * D, -acc2 * scale, D)
    store_tile(d_v + head_start * E, keys, keys < s, n * E, value_acc, E)


def differential_backward(
    maps: Maps,
    v: torch.Tensor,
    lam: torch.Tensor,
    masks: KernelMasks,
    logs: torch.Tensor,
    d_sums: torch.Tensor,
    d_out: torch.Tensor,
    *,
    scale: float,
    causal: bool,
) -> tuple[Maps, torch.Tensor]:
    """dq and dk of both maps, and dv; `d_sums` (2, b, h, t) holds D₁ and D₂."""
    b, t, h, d = maps.q1.shape
    s, n, e = v.shape[1:]
    d_maps = Maps(*(torch.empty_like(x, memory_format=torch.contiguous_format) for x in maps))
    d_v = torch.empty_like(v, memory_format=torch.contiguous_format)
    for name, kernel, gradients, tokens, heads in (
        ("differential_query_gradient", _query_gradient, (d_maps.q1, d_maps.q2), t, h),
        ("differential_key_gradient", _key_gradient, (d_maps.k1, d_maps.k2, d_v), s, n),
    ):
        tuned = configured(name, maps.q1, v)
        kernel[(triton.cdiv(tokens, tuned.rows) * b * heads,)](
            *maps, v, lam, d_out, logs, d_sums, *gradients,
            *masks, scale, t, s, h, n, logs.stride(0),
            *maps.strides, *v.stride(), *lam.stride(), *d_out.stride(),
            CAUSAL=causal, D=d, E=e, PADDED_D=padded_width(d), PADDED_E=padded_width(e),
            ROWS=tuned.rows, COLUMNS=tuned.columns, PRECISION=product_precision(v.dtype),
            FACTOR=triton_dtype(factor_dtype(v.dtype)),
            num_warps=tuned.warps, num_stages=tuned.stages,
        )  # fmt: skip
    return d_maps, d_v
