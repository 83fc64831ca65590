"""Softmax attention with options, forward: o = A v,  A = softmax(S + mask) with a sink's column.

S is that of `score_options.py`. Flash attention in tiles of ROWS queries and COLUMNS keys
(`configurations.py`), with the online softmax of `online_softmax.py`. A tile of queries visits only
keys within its window and its segments (`reach.py`): first the tiles that need no mask, then those
at the edges.

LASER's close heads (`laser_values.py`) are computed by the same kernel: v is W, the output is
ν + log(u + A W), and a program of another head returns at once. Keys and values that are wider than
a tile are computed in parts (`channel_parts.py`).

Grid: one program per part of the values' channels, tile of queries, head and sequence, the longest
first (`tile_order.py`). t s (d + e) products per head, half of them if causal; t w (d + e) with a
window of w tokens. A bias is read once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from precondattn.frame import Frame
from precondattn.kernel_backend.limits import padded_width
from precondattn.kernel_backend.precise import is_precise
from precondattn.spec.softmax import Softmax
from precondattn_triton.configurations import configuration
from precondattn_triton.launching import Constant, cdiv, launch
from precondattn_triton.precision import product_precision, splits_weights
from precondattn_triton.softmax.channel_parts import PARTS, is_wide, products_by_chunk
from precondattn_triton.softmax.laser_values import ValueSpread, log_mean_and_log
from precondattn_triton.softmax.online_softmax import (
    mean_and_log_with_sink,
    no_sums,
    row_sums,
    with_scores,
)
from precondattn_triton.softmax.reach import (
    is_visited,
    is_within,
    keys_in_reach,
    keys_of,
    tokens_again,
    visited,
    visits,
)
from precondattn_triton.softmax.score_options import ScoreOptions, options_of, scores_in_units
from precondattn_triton.softmax.tile_order import rows_of_program
from precondattn_triton.tiles import (
    CallSizes,
    KernelMasks,
    factor_dtype,
    heads,
    is_token,
    load_channels,
    masks_of,
    start_of,
    store_channels,
)

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


class AttentionCall(NamedTuple):
    """The inputs of a call, as kernels read them: any strides."""

    q: torch.Tensor
    """(b, t, h, d)"""
    k: torch.Tensor
    """(b, s, n, d), of the dtype of q"""
    v: torch.Tensor
    """(b, s, n, e), of the dtype of q; in LASER's close heads W, of the dtype of factors"""
    masks: KernelMasks
    options: ScoreOptions
    scale: float
    causal: bool
    sink: torch.Tensor | None = None
    """(h,), contiguous"""
    value_range: ValueSpread = ValueSpread(None, None, None)
    """The range of the values of LASER; without it, the output is a mean"""

    @property
    def arguments(self) -> tuple[object, ...]:
        """The arguments that all kernels end with."""
        (t, h), (s, n) = self.q.shape[1:3], self.k.shape[1:3]
        return self.masks, self.options, CallSizes(self.scale, t, s, h, n)

    @property
    def is_plain(self) -> bool:
        """Whether no option changes scores or masks."""
        return all(option is None for option in self.options[:4])

    @property
    def has_half_factors(self) -> bool:
        """Whether exponentials have 16 bits in products of gradients."""
        return bool(factor_dtype(self.q.dtype) == torch.bfloat16)

    @property
    def is_wide(self) -> bool:
        """Whether keys or values are wider than a tile."""
        factor = "bfloat16" if self.has_half_factors else "float32"
        return is_wide(factor, self.q.shape[3], self.v.shape[3])

    def constants(self, kernel: str, factor: torch.dtype, result: int) -> dict[str, Constant]:
        """The constants and options of a launch; `factor` is the dtype of weights in products, and
        `result` the width of what is computed in parts."""
        d, e, dtype = self.q.shape[3], self.v.shape[3], self.q.dtype
        is_laser, is_half = self.value_range.is_close is not None, factor.itemsize == 2
        padded_d, padded_e, parts, chunk = padded_width(d), padded_width(e), 1, 0
        name, width = "softmax", max(padded_d, padded_e)
        if self.is_wide:
            (width, chunk), name = PARTS[is_half], "wide"
            padded_d = padded_e = width
            parts = cdiv(result, width)
        elif is_laser and self.is_plain:
            name = "laser"
        tuned = configuration(f"{name}_{kernel}", width, is_half, self.v)
        return {
            "CAUSAL": self.causal,
            "D": d,
            "E": e,
            "PADDED_D": padded_d,
            "PADDED_E": padded_e,
            "PARTS": parts,
            "CHUNK": chunk,
            "ROWS": tuned.rows,
            "COLUMNS": tuned.columns,
            "PRECISION": product_precision(dtype),
            "TWO_PARTS": splits_weights(dtype) and not is_laser,
            "EXACT": dtype == torch.float32,
            "FACTOR": TRITON_DTYPES[factor],
            "num_warps": tuned.warps,
            "num_stages": tuned.stages,
        }


def attention_call(leaf: Softmax, x: Mapping[str, torch.Tensor], frame: Frame) -> AttentionCall:
    """A call as its kernels read it, in the dtype of the values."""
    v = x["v"]
    q, k = (x[name].to(v.dtype) for name in ("q", "k"))
    b, _, h, d = q.shape
    sink = x["sink"].contiguous() if leaf.sink else None
    masks, options = masks_of(frame, b), options_of(leaf, x, b, h)
    return AttentionCall(q, k, v, masks, options, leaf.scale_for(d), leaf.causal, sink)


class AttentionResults(NamedTuple):
    """The results of the forward kernel."""

    out: torch.Tensor
    """o (b, t, h, e)"""
    full: torch.Tensor
    """o in float32: `out` itself if that is float32"""
    logs: torch.Tensor
    """λ (b, h, t), float32, of keys and sink; ∞ for rows without keys"""


@triton.jit
def _forward(
    q, k, v, sink, value_range, out, full, logs, masks, scoring, sizes,
    CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_E: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    TWO_PARTS: tl.constexpr, EXACT: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    tile, part, batch, head, kv, rows, is_row = rows_of_program(masks, sizes, CAUSAL, ROWS, PARTS)
    closeness = value_range.is_close
    if closeness is not None and tl.load(closeness + batch * sizes.n + kv) == 0:
        return
    first = part * PADDED_E
    q_start, k_start, v_start = (
        start_of(q, batch, head),
        start_of(k, batch, kv),
        start_of(v, batch, kv),
    )
    if CHUNK == 0:
        q_tile = load_channels(q, q_start, rows, is_row, D, PADDED_D)

    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = no_sums(FACTOR, ROWS)
    acc = tl.zeros((ROWS, PADDED_E), tl.float32)
    begin, low, high, end = keys_in_reach(
        tile * ROWS, ROWS, batch, masks, scoring, sizes, CAUSAL, COLUMNS
    )
    has_first: tl.constexpr = scoring.window is not None or masks.segment is not None
    first_keys, last_keys = keys_of(rows[:, None], batch, masks, scoring, sizes, CAUSAL)
    # Two loops over wide rows spill more registers than one.
    WIDEST: tl.constexpr = 256 if tl.float32 == FACTOR else 512
    IS_WIDE: tl.constexpr = CHUNK > 0 or PADDED_D + PADDED_E > WIDEST
    IS_ONE_LOOP: tl.constexpr = IS_WIDE or masks.k_valid is not None
    if IS_ONE_LOOP:
        low, high = begin, begin
    for phase in tl.static_range(1 if IS_ONE_LOOP else 0, 2):
        first_visit, last_visit = visits(begin, low, high, end, phase)
        for visit in range(first_visit, last_visit, COLUMNS):
            columns = visited(visit, low, high, phase) + tl.arange(0, COLUMNS)
            is_key = is_visited(masks.k_valid, batch, columns, sizes.s, phase == 0)
            if CHUNK == 0:
                k_tile = load_channels(
                    k, k_start, columns, is_key, D, PADDED_D, IS_WHOLE=phase == 0
                )
                products = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            else:
                products = products_by_chunk(
                    q, q_start, rows, is_row, k, k_start, columns, is_key, D, CHUNK, PRECISION
                )
            values = load_channels(
                v, v_start, columns, is_key, E, PADDED_E, first, IS_WHOLE=phase == 0
            ).to(FACTOR)
            scores, unit = scores_in_units(
                products, rows[:, None], columns[None, :], is_row[:, None] & is_key[None, :],
                batch, head, sizes.t, sizes.s, sizes.scale, scoring, EXACT,
            )  # fmt: skip
            if phase == 1:
                mask = is_within(columns[None, :], first_keys, last_keys, has_first)
                if masks.k_valid is not None:
                    mask &= is_key[None, :]
                scores = tl.where(mask, scores, float("-inf"))
            largest, total, acc = with_scores(
                largest, total, acc, scores, unit, values, PRECISION, TWO_PARTS
            )

    rows = tokens_again(tile, ROWS)
    is_row = is_token(masks.q_valid, batch, rows, sizes.t)
    if value_range.is_close is None:
        o, log_total = mean_and_log_with_sink(largest, total, acc, is_row, sink, head)
    else:
        o, log_total = log_mean_and_log(
            largest, row_sums(total), acc, is_row,
            value_range, batch * sizes.n + kv, first, E, PADDED_E,
        )  # fmt: skip
    is_stored = rows < sizes.t
    at = logs + (batch * sizes.h + head) * sizes.t + rows
    tl.store(at, log_total, mask=is_stored & (part == 0))
    start, step = (batch * sizes.t * sizes.h + head) * E, sizes.h * E
    store_channels(out + start, rows, is_stored, step, o, E, first)
    if full is not None:
        store_channels(full + start, rows, is_stored, step, o, E, first)


def attention_forward(call: AttentionCall) -> AttentionResults:
    """One launch; the output has the dtype of the inputs. LASER's heads that are not close are not
    written."""
    (b, t, h, _), e = call.q.shape, call.v.shape[3]
    out = call.q.new_empty((b, t, h, e))
    full = None if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    logs = out.new_empty((b, h, t), dtype=torch.float32)
    constants = call.constants("forward", _weights_dtype(call.v.dtype), e)
    launch(
        _forward, (cdiv(t, constants["ROWS"]) * constants["PARTS"] * b * h,),
        heads(call.q), heads(call.k), heads(call.v), call.sink, call.value_range, out, full, logs,
        *call.arguments, **constants,
    )  # fmt: skip
    return AttentionResults(out, out if full is None else full, logs)


def _weights_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of P ≤ 1 and v in their product, for which float16 has the range."""
    return torch.float32 if dtype == torch.float16 and is_precise() else dtype
