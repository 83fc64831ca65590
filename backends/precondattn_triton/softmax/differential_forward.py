"""Differential attention forward: o = A₁ v − λ A₂ v,  A_m = softmax(s q_m k_mᵀ + mask).

Flash attention with two maps, in tiles of ROWS queries and COLUMNS keys (`configurations.py`). One
pass over the keys loads a tile of values once, and weights it by the scores of both maps,

    S₁ = s q₁ k₁ᵀ,    S₂ = s q₂ k₂ᵀ,    acc_m ← acc_m 2^{m_m − m'_m} + P_m V,

each with its own running maximum (`score_tiles.py`). o₁ = acc₁ / l₁ and o₂ = acc₂ / l₂ are float32,
and so is the difference o₁ − λ o₂, which cancels if the maps nearly agree.

Grid: one program per tile of queries, head and sequence. t s (2 d + 2 e) products per head, half of
them if causal. Both accumulators are in registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from precondattn.kernel_backend.limits import padded_width
from precondattn_triton.precision import product_precision
from precondattn_triton.softmax.score_tiles import mean_and_log, with_tile
from precondattn_triton.tiles import (
    LOG2_E,
    KernelMasks,
    configured,
    factor_dtype,
    is_token,
    keys_met,
    load_tile,
    may_attend,
    store_tile,
    tile_of_program,
)


class Maps(NamedTuple):
    """Queries (b, t, h, d) and keys (b, s, n, d) of both maps, of one dtype."""

    q1: torch.Tensor
    k1: torch.Tensor
    q2: torch.Tensor
    k2: torch.Tensor

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(stride for x in self for stride in x.stride())


class DifferentialResults(NamedTuple):
    """The results of the forward kernel."""

    out: torch.Tensor
    """o (b, t, h, e), in the dtype of v"""
    full: torch.Tensor
    """o in float32: `out` itself if that is float32"""
    second: torch.Tensor
    """o₂ (b, t, h, e), float32"""
    logs: torch.Tensor
    """λ of both maps (2, b, h, t), float32"""


@triton.jit
def row_weights(lam, batch, head, rows, is_row, l_batch, l_token, l_head):
    """The differential weight λ of rows, float32."""
    at = lam + batch * l_batch + rows.to(tl.int64) * l_token + head * l_head
    return tl.load(at, mask=is_row, other=0.0).to(tl.float32)


@triton.jit
def _forward(
    q1, k1, q2, k2, v, lam, out, full, second, logs,
    q_valid, k_valid, segment,
    scale, t, s, h, n, logs_map,
    q1_batch, q1_token, q1_head, q1_channel, k1_batch, k1_token, k1_head, k1_channel,
    q2_batch, q2_token, q2_head, q2_channel, k2_batch, k2_token, k2_head, k2_channel,
    v_batch, v_token, v_head, v_channel, l_batch, l_token, l_head,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    tile, batch, head = tile_of_program(tl.cdiv(t, ROWS), h)
    kv = head // (h // n)
    rows = tile * ROWS + tl.arange(0, ROWS)
    is_row = is_token(q_valid, batch, rows, t)
    q1_tile = load_tile(
        q1 + batch * q1_batch + head * q1_head, rows, is_row, q1_token, q1_channel, D, PADDED_D
    )
    q2_tile = load_tile(
        q2 + batch * q2_batch + head * q2_head, rows, is_row, q2_token, q2_channel, D, PADDED_D
    )
    k1 += batch * k1_batch + kv * k1_head
    k2 += batch * k2_batch + kv * k2_head
    v += batch * v_batch + kv * v_head

    largest1 = tl.full((ROWS,), float("-inf"), tl.float32)
    largest2 = tl.full((ROWS,), float("-inf"), tl.float32)
    total1 = tl.zeros((ROWS,), tl.float32)
    total2 = tl.zeros((ROWS,), tl.float32)
    acc1 = tl.zeros((ROWS, PADDED_E), tl.float32)
    acc2 = tl.zeros((ROWS, PADDED_E), tl.float32)
    begin, end = keys_met(tile * ROWS, ROWS, batch, t, s, segment, CAUSAL)
    begin = begin // COLUMNS * COLUMNS
    # Keys from `begin` to `open_end` are masked in no row.
    open_end = s // COLUMNS * COLUMNS
    if CAUSAL:
        open_end = tl.maximum(tile * ROWS + (s - t) + 1, 0) // COLUMNS * COLUMNS
    if k_valid is not None or segment is not None:
        open_end = begin
    for phase in tl.static_range(2):
        if phase == 0:
            low, high = begin, open_end
        else:
            low, high = open_end, end
        for start in range(low, high, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            is_key = is_token(k_valid, batch, columns, s)
            k1_tile = load_tile(k1, columns, is_key, k1_token, k1_channel, D, PADDED_D)
            k2_tile = load_tile(k2, columns, is_key, k2_token, k2_channel, D, PADDED_D)
            values = load_tile(v, columns, is_key, v_token, v_channel, E, PADDED_E).to(FACTOR)
            s1 = tl.dot(q1_tile, tl.trans(k1_tile), input_precision=PRECISION) * (scale * LOG2_E)
            s2 = tl.dot(q2_tile, tl.trans(k2_tile), input_precision=PRECISION) * (scale * LOG2_E)
            if phase == 1:
                mask = may_attend(
                    rows[:, None], columns[None, :], is_key[None, :], batch, t, s,
                    segment, CAUSAL,
                )  # fmt: skip
                s1 = tl.where(mask, s1, float("-inf"))
                s2 = tl.where(mask, s2, float("-inf"))
            largest1, total1, acc1 = with_tile(largest1, total1, acc1, s1, values, PRECISION)
            largest2, total2, acc2 = with_tile(largest2, total2, acc2, s2, values, PRECISION)

    o1, logs1 = mean_and_log(largest1, total1, acc1, is_row)
    o2, logs2 = mean_and_log(largest2, total2, acc2, is_row)
    at = logs + (batch * h + head) * t + rows
    tl.store(at, logs1, mask=rows < t)
    tl.store(at + logs_map, logs2, mask=rows < t)
    weight = row_weights(lam, batch, head, rows, is_row, l_batch, l_token, l_head)
    o = o1 - weight[:, None] * o2
    start = (batch * t * h + head) * E
    store_tile(out + start, rows, rows < t, h * E, o, E)
    if full is not None:
        store_tile(full + start, rows, rows < t, h * E, o, E)
    store_tile(second + start, rows, rows < t, h * E, o2, E)


def differential_forward(
    maps: Maps,
    v: torch.Tensor,
    lam: torch.Tensor,
    masks: KernelMasks,
    *,
    scale: float,
    causal: bool,
) -> DifferentialResults:
    """v (b, s, n, e) has the dtype of the maps; λ is (b, t, h). Any strides."""
    b, t, h, d = maps.q1.shape
    s, n, e = v.shape[1:]
    out = v.new_empty((b, t, h, e))
    full = None if v.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    second = torch.empty_like(out, dtype=torch.float32)
    logs = second.new_empty((2, b, h, t))
    tuned = configured("differential_forward", maps.q1, v)
    _forward[(triton.cdiv(t, tuned.rows) * b * h,)](
        *maps, v, lam, out, full, second, logs, *masks, scale, t, s, h, n, logs.stride(0),
        *maps.strides, *v.stride(), *lam.stride(),
        CAUSAL=causal, D=d, E=e, PADDED_D=padded_width(d), PADDED_E=padded_width(e),
        ROWS=tuned.rows, COLUMNS=tuned.columns, PRECISION=product_precision(v.dtype),
        FACTOR=triton_dtype(factor_dtype(v.dtype)),
        num_warps=tuned.warps, num_stages=tuned.stages,
    )  # fmt: skip
    return DifferentialResults(out, out if full is None else full, second, logs)


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """The dtype of factors in Triton."""
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float32
