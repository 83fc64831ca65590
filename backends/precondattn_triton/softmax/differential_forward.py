"""Differential attention forward: o = A₁ v − λ A₂ v,  A_m = softmax(S_m + mask).

Flash attention with two maps, in tiles of ROWS queries and COLUMNS keys (`configurations.py`). One
pass over the keys loads a tile of values once, and weights it by the scores of both maps,

    S₁ = s q₁ k₁ᵀ,    S₂ = s q₂ k₂ᵀ,    acc_m ← acc_m 2^{m_m − m'_m} + P_m V,

each with its own running maximum (`online_softmax.py`). Both have the same options
(`score_options.py`) and the same sink, and need a mask in the same tiles (`reach.py`).
o₁ = acc₁ / l₁ and o₂ = acc₂ / l₂ are float32, and so is the difference o₁ − λ o₂, which cancels if
the maps nearly agree.

Grid: one program per part of the values' channels, tile of queries, head and sequence. There is one
part up to 256 channels (`channel_parts.py`). t s (2 d + 2 e) products per head, half of them if
causal, and with more parts 2 t s d for each. Both accumulators are in registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from precondattn.kernel_backend.limits import padded_width
from precondattn_triton.configurations import configuration
from precondattn_triton.launching import Constant, cdiv, launch
from precondattn_triton.precision import product_precision
from precondattn_triton.softmax.channel_parts import WIDEST_PART, load_part, part_width, store_part
from precondattn_triton.softmax.online_softmax import mean_and_log_with_sink, with_scores
from precondattn_triton.softmax.reach import is_within, keys_in_reach, keys_of
from precondattn_triton.softmax.row_sums import no_sums
from precondattn_triton.softmax.score_options import ScoreOptions, scores_in_units
from precondattn_triton.softmax.visits import is_visited, visited, visits
from precondattn_triton.tiles import (
    KernelMasks,
    factor_dtype,
    is_token,
    load_tile,
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
    q1, k1, q2, k2, v, lam, sink, out, full, second, logs,
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
    tiles = tl.cdiv(t, ROWS)
    if PARTS == 1:
        tile, batch, head = tile_of_program(tiles, h)
        first = 0
    else:
        tile_and_part, batch, head = tile_of_program(tiles * PARTS, h)
        tile, first = tile_and_part % tiles, tile_and_part // tiles * CHANNELS
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
    total1, total2 = no_sums(v, ROWS), no_sums(v, ROWS)
    acc1 = tl.zeros((ROWS, CHANNELS), tl.float32)
    acc2 = tl.zeros((ROWS, CHANNELS), tl.float32)
    begin, low, high, end = keys_in_reach(
        tile * ROWS, ROWS, batch, t, s, segment, window, CAUSAL, COLUMNS
    )
    has_first: tl.constexpr = window is not None or segment is not None
    first_keys, last_keys = keys_of(rows[:, None], batch, t, s, segment, window, CAUSAL)
    if k_valid is not None:  # One loop masks all tiles.
        low, high = begin, begin
    for phase in tl.static_range(0 if k_valid is None else 1, 2):
        begins, ends = visits(begin, low, high, end, phase)
        for visit in range(begins, ends, COLUMNS):
            columns = visited(visit, low, high, phase) + tl.arange(0, COLUMNS)
            is_key = is_visited(k_valid, batch, columns, s, phase == 0)
            is_pair = is_row[:, None] & is_key[None, :]
            k1_tile = load_tile(k1, columns, is_key, k1_token, k1_channel, D, PADDED_D)
            k2_tile = load_tile(k2, columns, is_key, k2_token, k2_channel, D, PADDED_D)
            values = load_part(v, columns, is_key, v_token, v_channel, first, E, CHANNELS).to(
                FACTOR
            )
            s1, unit = scores_in_units(
                tl.dot(q1_tile, tl.trans(k1_tile), input_precision=PRECISION),
                rows[:, None], columns[None, :], is_pair, batch, head, t, s, scale,
                softcap, bias, slopes, bias_batch, bias_head, bias_row, bias_column, EXACT,
            )  # fmt: skip
            s2, _ = scores_in_units(
                tl.dot(q2_tile, tl.trans(k2_tile), input_precision=PRECISION),
                rows[:, None], columns[None, :], is_pair, batch, head, t, s, scale,
                softcap, bias, slopes, bias_batch, bias_head, bias_row, bias_column, EXACT,
            )  # fmt: skip
            if phase == 1:
                mask = is_within(columns[None, :], first_keys, last_keys, has_first)
                if k_valid is not None:
                    mask &= is_key[None, :]
                s1 = tl.where(mask, s1, float("-inf"))
                s2 = tl.where(mask, s2, float("-inf"))
            largest1, total1, acc1 = with_scores(
                largest1, total1, acc1, s1, unit, values, PRECISION, False
            )
            largest2, total2, acc2 = with_scores(
                largest2, total2, acc2, s2, unit, values, PRECISION, False
            )

    o1, logs1 = mean_and_log_with_sink(largest1, total1, acc1, is_row, sink, head)
    o2, logs2 = mean_and_log_with_sink(largest2, total2, acc2, is_row, sink, head)
    at = logs + (batch * h + head) * t + rows
    is_first = (rows < t) & (first == 0)
    tl.store(at, logs1, mask=is_first)
    tl.store(at + logs_map, logs2, mask=is_first)
    weight = row_weights(lam, batch, head, rows, is_row, l_batch, l_token, l_head)
    o = o1 - weight[:, None] * o2
    start = (batch * t * h + head) * E
    store_part(out + start, rows, rows < t, h * E, first, o, E)
    if full is not None:
        store_part(full + start, rows, rows < t, h * E, first, o, E)
    store_part(second + start, rows, rows < t, h * E, first, o2, E)


class DifferentialCall(NamedTuple):
    """The inputs of a call, as kernels read them."""

    maps: Maps
    v: torch.Tensor
    """(b, s, n, e), in the dtype of the maps"""
    lam: torch.Tensor
    """λ (b, t, h)"""
    sink: torch.Tensor | None
    """(h,), contiguous"""
    masks: KernelMasks
    options: ScoreOptions
    scale: float
    causal: bool

    @property
    def arrays(self) -> tuple[torch.Tensor | None, ...]:
        """The arguments that all kernels begin with."""
        return *self.maps, self.v, self.lam, self.sink

    @property
    def sizes(self) -> tuple[object, ...]:
        """The arguments that all kernels have, from `q_valid` on."""
        (b, t, h, _), (s, n) = self.maps.q1.shape, self.v.shape[1:3]
        sizes = self.scale, t, s, h, n, b * h * t
        strides = *self.maps.strides, *self.v.stride(), *self.lam.stride()
        return (*self.masks, *self.options.arguments, *sizes, *strides)

    def constants(self, kernel: str, widest: int = WIDEST_PART) -> dict[str, Constant]:
        """The constants and options of a launch, whose parts of values have `widest` channels."""
        d, e, dtype = self.maps.q1.shape[3], self.v.shape[3], factor_dtype(self.v.dtype)
        width, channels = max(padded_width(d), part_width(e)), part_width(e, widest)
        tuned = configuration(kernel, width, dtype == torch.bfloat16, self.v)
        return {
            "CAUSAL": self.causal,
            "D": d,
            "E": e,
            "PADDED_D": padded_width(d),
            "CHANNELS": channels,
            "PARTS": cdiv(e, channels),
            "ROWS": tuned.rows,
            "COLUMNS": tuned.columns,
            "PRECISION": product_precision(self.v.dtype),
            "EXACT": self.v.dtype == torch.float32,
            "FACTOR": triton_dtype(dtype),
            "num_warps": tuned.warps,
            "num_stages": tuned.stages,
        }


def differential_forward(call: DifferentialCall) -> DifferentialResults:
    """One launch."""
    (b, t, h, _), v = call.maps.q1.shape, call.v
    out = v.new_empty((b, t, h, v.shape[3]))
    full = None if v.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    second = torch.empty_like(out, dtype=torch.float32)
    logs = second.new_empty((2, b, h, t))
    constants = call.constants("differential_forward")
    launch(
        _forward,
        (cdiv(t, constants["ROWS"]) * constants["PARTS"] * b * h,),
        *call.arrays,
        out,
        full,
        second,
        logs,
        *call.sizes,
        **constants,
    )
    return DifferentialResults(out, out if full is None else full, second, logs)


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """The dtype of factors in Triton."""
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float32
