"""Softmax attention with options, forward: o = A v,  A = softmax(S + mask) with a sink's column.

S is that of `score_options.py`. Flash attention in tiles of ROWS queries and COLUMNS keys
(`configurations.py`), with the online softmax of `online_softmax.py`. A tile of queries visits only
keys within its window and its segments (`reach.py`): first the tiles that need no mask, then those
at the edges.

Grid: one program per tile of queries, head and sequence, the longest first. t s (d + e) products
per head, half of them if causal; t w (d + e) with a window of w tokens. A bias is read once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from precondattn.kernel_backend.limits import padded_width
from precondattn.kernel_backend.precise import is_precise
from precondattn_triton.configurations import configuration
from precondattn_triton.launching import Constant, cdiv, launch
from precondattn_triton.precision import product_precision, splits_weights
from precondattn_triton.softmax.online_softmax import mean_and_log_with_sink, with_scores
from precondattn_triton.softmax.reach import is_within, keys_in_reach, keys_of
from precondattn_triton.softmax.row_sums import no_sums
from precondattn_triton.softmax.score_options import ScoreOptions, scores_in_units
from precondattn_triton.softmax.visits import is_visited, visited, visits
from precondattn_triton.tiles import (
    KernelMasks,
    is_token,
    load_tile,
    store_tile,
    tile_of_program,
)

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


class SoftmaxArrays(NamedTuple):
    """The inputs of a call, as kernels read them: one dtype, any strides."""

    q: torch.Tensor
    """(b, t, h, d)"""
    k: torch.Tensor
    """(b, s, n, d)"""
    v: torch.Tensor
    """(b, s, n, e)"""
    sink: torch.Tensor | None
    """(h,), contiguous"""
    masks: KernelMasks
    options: ScoreOptions
    scale: float
    causal: bool

    @property
    def arguments(self) -> tuple[object, ...]:
        """The arguments that all kernels have, from `q_valid` on."""
        (t, h), (s, n) = self.q.shape[1:3], self.k.shape[1:3]
        strides = *self.q.stride(), *self.k.stride(), *self.v.stride()
        return (*self.masks, *self.options.arguments, self.scale, t, s, h, n, *strides)

    def constants(self, kernel: str, factor: torch.dtype) -> dict[str, Constant]:
        """The constants and options of a launch; `factor` is the dtype of weights in products."""
        d, e, dtype = self.q.shape[3], self.v.shape[3], self.v.dtype
        width = max(padded_width(d), padded_width(e))
        tuned = configuration(kernel, width, factor.itemsize == 2, self.v)
        return {
            "CAUSAL": self.causal,
            "D": d,
            "E": e,
            "PADDED_D": padded_width(d),
            "PADDED_E": padded_width(e),
            "ROWS": tuned.rows,
            "COLUMNS": tuned.columns,
            "PRECISION": product_precision(dtype),
            "TWO_PARTS": splits_weights(dtype),
            "EXACT": dtype == torch.float32,
            "FACTOR": TRITON_DTYPES[factor],
            "num_warps": tuned.warps,
            "num_stages": tuned.stages,
        }


class SoftmaxResults(NamedTuple):
    """The results of the forward kernel."""

    out: torch.Tensor
    """o (b, t, h, e), in the dtype of v"""
    full: torch.Tensor
    """o in float32: `out` itself if that is float32"""
    logs: torch.Tensor
    """λ (b, h, t), float32, of keys and sink; ∞ for rows without keys"""


@triton.jit
def _forward(
    q, k, v, sink, out, full, logs,
    q_valid, k_valid, segment,
    softcap, window, bias, slopes, bias_batch, bias_head, bias_row, bias_column,
    scale, t, s, h, n,
    q_batch, q_token, q_head, q_channel, k_batch, k_token, k_head, k_channel,
    v_batch, v_token, v_head, v_channel,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    TWO_PARTS: tl.constexpr, EXACT: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    tile, batch, head = tile_of_program(tl.cdiv(t, ROWS), h)
    kv = head // (h // n)
    rows = tile * ROWS + tl.arange(0, ROWS)
    is_row = is_token(q_valid, batch, rows, t)
    q_tile = load_tile(
        q + batch * q_batch + head * q_head, rows, is_row, q_token, q_channel, D, PADDED_D
    )
    k += batch * k_batch + kv * k_head
    v += batch * v_batch + kv * v_head

    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = no_sums(v, ROWS)
    acc = tl.zeros((ROWS, PADDED_E), tl.float32)
    begin, low, high, end = keys_in_reach(
        tile * ROWS, ROWS, batch, t, s, segment, window, CAUSAL, COLUMNS
    )
    has_first: tl.constexpr = window is not None or segment is not None
    first_keys, last_keys = keys_of(rows[:, None], batch, t, s, segment, window, CAUSAL)
    # Two loops over wide rows in float32 spill more registers than one.
    IS_WIDE: tl.constexpr = EXACT and PADDED_D + PADDED_E > 256
    IS_ONE_LOOP: tl.constexpr = IS_WIDE or k_valid is not None
    if IS_ONE_LOOP:
        low, high = begin, begin
    for phase in tl.static_range(1 if IS_ONE_LOOP else 0, 2):
        first, last = visits(begin, low, high, end, phase)
        for visit in range(first, last, COLUMNS):
            columns = visited(visit, low, high, phase) + tl.arange(0, COLUMNS)
            is_key = is_visited(k_valid, batch, columns, s, phase == 0)
            k_tile = load_tile(k, columns, is_key, k_token, k_channel, D, PADDED_D)
            values = load_tile(v, columns, is_key, v_token, v_channel, E, PADDED_E).to(FACTOR)
            products = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            scores, unit = scores_in_units(
                products, rows[:, None], columns[None, :], is_row[:, None] & is_key[None, :],
                batch, head, t, s, scale,
                softcap, bias, slopes, bias_batch, bias_head, bias_row, bias_column, EXACT,
            )  # fmt: skip
            if phase == 1:
                mask = is_within(columns[None, :], first_keys, last_keys, has_first)
                if k_valid is not None:
                    mask &= is_key[None, :]
                scores = tl.where(mask, scores, float("-inf"))
            largest, total, acc = with_scores(
                largest, total, acc, scores, unit, values, PRECISION, TWO_PARTS
            )
    o, log_total = mean_and_log_with_sink(largest, total, acc, is_row, sink, head)
    tl.store(logs + (batch * h + head) * t + rows, log_total, mask=rows < t)
    at = (batch * t * h + head) * E
    store_tile(out + at, rows, rows < t, h * E, o, E)
    if full is not None:
        store_tile(full + at, rows, rows < t, h * E, o, E)


def softmax_forward(call: SoftmaxArrays) -> SoftmaxResults:
    """One launch."""
    (b, t, h, _), v = call.q.shape, call.v
    out = v.new_empty((b, t, h, v.shape[3]))
    full = None if v.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    logs = v.new_empty((b, h, t), dtype=torch.float32)
    constants = call.constants("softmax_forward", _weights_dtype(v.dtype))
    launch(
        _forward,
        (cdiv(t, constants["ROWS"]) * b * h,),
        call.q,
        call.k,
        v,
        call.sink,
        out,
        full,
        logs,
        *call.arguments,
        **constants,
    )
    return SoftmaxResults(out, out if full is None else full, logs)


def _weights_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of P ≤ 1 and v in their product, for which float16 has the range."""
    return torch.float32 if dtype == torch.float16 and is_precise() else dtype
