"""LASER forward: o_ic = log Σ_j a_ij e^{v_jc},  a_ij = e^{S_ij − λ_i},  S = scale ⟨q_i, k_j⟩ + …

A kv head of a sequence whose values are near each other is *close* (`laser_values.py`). There LASER
is flash attention with the values W = e^{v − ν} − u:

    P = e^{S − m},    l ← l e^{m − m'} + rowsum(P),    acc ← acc e^{m − m'} + P W,
    o = ν + log(u + acc / l),    λ = m + log l,

in tiles of ROWS queries and COLUMNS keys (`configurations.py`), with the running maximum m of each
row; l sums P after its rounding for the product, so that acc / l is a weighted mean. All other
heads are *exact*: they are computed one key at a time (`laser_exact.py`). S is that of
`score_options.py`.

Kernels after those of `laser_values.py`, in order, and their grids:

    close      o and λ of the close heads        one program per tile of queries and head
    exact      o and λ of the other heads        one program per part of channels, tile of queries
                                                 and head

`is_close` is computed and stored on the device; a program of the other kind returns at once.
Only tiles at a border are masked (`visits.py`), and the longest programs begin first
(`tile_order.py`). Keys and values that are wider than a tile are in `laser_wide.py`.
Close: 2 t s (d + e) FLOPs per head, half of them if causal; q, k and W are read from memory, k and
W once per tile of queries. Exact: t s e exponentials per head.
A row in which all keys are masked has o = 0 and λ = ∞, so that all its weights are 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from precondattn_triton.launching import cdiv, launch
from precondattn_triton.precision import product_precision
from precondattn_triton.softmax.laser_call import LaserCall
from precondattn_triton.softmax.laser_exact import exact_forward
from precondattn_triton.softmax.laser_values import ValueSpread, log_mean_and_log, weights
from precondattn_triton.softmax.laser_wide import wide_forward
from precondattn_triton.softmax.online_softmax import with_scores
from precondattn_triton.softmax.reach import keys_in_reach, may_attend_within
from precondattn_triton.softmax.row_sums import no_sums, row_sums
from precondattn_triton.softmax.score_options import scores_in_units
from precondattn_triton.softmax.tile_order import longest_first
from precondattn_triton.softmax.visits import load_visited, tokens_again, visited, visits
from precondattn_triton.tiles import (
    is_token,
    load_tile,
    store_tile,
)


class LaserResults(NamedTuple):
    """The results of the forward kernels."""

    out: torch.Tensor
    """o (b, t, h, e), in the dtype of v"""
    full: torch.Tensor
    """o in float32: `out` itself if that is float32"""
    log_total: torch.Tensor
    """λ (b, h, t), float32"""


@triton.jit
def _close(
    q, k, w, shift, less, is_close, out, full, log_total,
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
    k += batch * k_batch + kv * k_head
    w += (batch * n + kv) * s * E

    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = no_sums(w, ROWS)
    acc = tl.zeros((ROWS, PADDED_E), tl.float32)
    begin, low, high, end = keys_in_reach(
        tile * ROWS, ROWS, batch, t, s, segment, window, CAUSAL, COLUMNS
    )
    # Two loops over wide rows spill more registers than one.
    WIDEST: tl.constexpr = 256 if w.dtype.element_ty == tl.float32 else 512
    IS_ONE_LOOP: tl.constexpr = PADDED_D + PADDED_E > WIDEST
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
            products = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            is_key = is_token(k_valid, batch, columns, s)
            scores, unit = scores_in_units(
                products, rows[:, None], columns[None, :], is_row[:, None] & is_key[None, :],
                batch, head, t, s, scale,
                softcap, bias, slopes, bias_batch, bias_head, bias_row, bias_column, EXACT,
            )  # fmt: skip
            if phase == 1 or k_valid is not None:
                mask = is_key[None, :]
                if phase == 1:
                    mask = may_attend_within(
                        rows[:, None], columns[None, :], mask, batch, t, s, segment, window, CAUSAL
                    )
                scores = tl.where(mask, scores, float("-inf"))
            largest, total, acc = with_scores(
                largest, total, acc, scores, unit, w_tile, PRECISION, False
            )

    total = row_sums(total)
    rows = tokens_again(tile, ROWS)
    is_row = is_token(q_valid, batch, rows, t)
    o, logs = log_mean_and_log(
        largest, total, acc, is_row, shift, less, batch * n + kv, 0, E, PADDED_E
    )
    tl.store(log_total + (batch * h + head) * t + rows, logs, mask=rows < t)
    start = (batch * t * h + head) * E
    store_tile(out + start, rows, rows < t, h * E, o, E)
    if full is not None:
        store_tile(full + start, rows, rows < t, h * E, o, E)


# ------------------------------------------------------------------------------------- launch


def laser_forward(call: LaserCall, value_range: ValueSpread) -> LaserResults:
    """o and λ of all heads."""
    (b, t, h, _), v = call.q.shape, call.v
    out = v.new_empty((b, t, h, v.shape[3]))
    full = None if v.dtype == torch.float32 else v.new_empty(out.shape, dtype=torch.float32)
    log_total = v.new_empty((b, h, t), dtype=torch.float32)
    outputs = out, full, log_total

    w = weights(v, call.masks, value_range)
    if call.is_wide:
        wide_forward(call, w, value_range, outputs)
    else:
        tuned = call.configured("forward")
        launch(
            _close, (cdiv(t, tuned.rows) * b * h,),
            call.q, call.k, w, *value_range, *outputs, *call.arguments,
            **call.constants, PADDED_D=call.padded_key, PADDED_E=call.padded_value,
            ROWS=tuned.rows, COLUMNS=tuned.columns,
            PRECISION=product_precision(v.dtype), EXACT=call.is_exact,
            num_warps=tuned.warps, num_stages=tuned.stages,
        )  # fmt: skip
    exact_forward(call, value_range.is_close, outputs)
    return LaserResults(out, out if full is None else full, log_total)
