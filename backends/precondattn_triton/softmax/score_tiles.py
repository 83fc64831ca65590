"""Online softmax over tiles of scores, as in flash attention; A is recomputed from λ backward.

Forward, for the scores S of a tile in units of log 2, −∞ where masked:

    m' = max(m, max S),    P = 2^{S − m'},    l ← l 2^{m − m'} + rowsum(P),
    acc ← acc 2^{m − m'} + P V,    o = acc / l,    λ = m log 2 + log l.

Backward, with D = rowsum(do ∘ o),

    A = e^{S − λ},    dV = Aᵀ do,    dS = A ∘ (do Vᵀ − D).

l sums P after its rounding for the product, so that acc / l is a weighted mean. A row in which all
keys are masked has o = 0 and λ = ∞, so that all its weights are 0.

The rows of dS sum to 0. If keys are nearly equal, dq = dS k cancels almost completely, and dS with
8 bits leaves few correct digits. A precise kernel splits P and dS into two 16-bit parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from precondattn.kernel_backend.limits import padded_width
from precondattn_triton.launching import cdiv, launch
from precondattn_triton.tiles import (
    LOG2_E,
    heads,
    is_token,
    load_channels,
    load_tile,
    start_of,
    tile_of_program,
)

ELEMENTS = 4096
"""Elements in a tile of `_row_products`."""


@triton.jit
def add_product(left, right, acc, PRECISION: tl.constexpr, TWO_PARTS: tl.constexpr):
    """acc + left right, for `left` in float32, rounded to the dtype of `right`, or split in two."""
    high = left.to(right.dtype)
    acc = tl.dot(high, right, acc, input_precision=PRECISION)
    if TWO_PARTS:
        low = (left - high.to(tl.float32)).to(right.dtype)
        acc = tl.dot(low, right, acc, input_precision=PRECISION)
    return acc


@triton.jit
def with_tile(
    largest, total, acc, scores, values, PRECISION: tl.constexpr, TWO_PARTS: tl.constexpr = False
):
    """m, l and acc after one more tile."""
    higher = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2(largest - base)
    p = tl.exp2(scores - base[:, None])
    acc *= shrink[:, None]
    if TWO_PARTS:
        total = total * shrink + tl.sum(p, 1)
        acc = add_product(p, values, acc, PRECISION, True)
    else:
        p = p.to(values.dtype)
        total = total * shrink + tl.sum(p.to(tl.float32), 1)
        acc = tl.dot(p, values, acc, input_precision=PRECISION)
    return higher, total, acc


@triton.jit
def mean_and_log(largest, total, acc, is_row):
    """o and λ of rows; 0 and ∞ for rows that are not valid or have no key; NaN where a key is."""
    has_keys = is_row & (total != 0)
    divisor = tl.where(has_keys, total, 1.0)
    o = tl.where(has_keys[:, None], acc / divisor[:, None], 0.0)
    logs = tl.where(has_keys, largest / LOG2_E + tl.log(divisor), float("inf"))
    return o, logs


@triton.jit
def load_logs(log_total, start, rows, is_row):
    """λ in units of log 2, ∞ for rows that are not valid."""
    return tl.load(log_total + start + rows, mask=is_row, other=float("inf")) * LOG2_E


@triton.jit
def _row_products(
    d_out, full, log_total, q_valid, d_sum, t, h,
    E: tl.constexpr, PADDED_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile, batch, head = tile_of_program(tl.cdiv(t, ROWS), h)
    rows = tile * ROWS + tl.arange(0, ROWS)
    is_row = is_token(q_valid, batch, rows, t)
    at = (batch * h + head) * t + rows
    has_keys = tl.load(log_total + at, mask=is_row, other=float("inf")) < float("inf")
    d_o = load_channels(d_out, start_of(d_out, batch, head), rows, has_keys, E, PADDED_E)
    d_o = d_o.to(tl.float32)
    o = load_tile(full + (batch * t * h + head) * E, rows, has_keys, h * E, E, PADDED_E)
    tl.store(d_sum + at, tl.sum(d_o * o.to(tl.float32), 1), mask=rows < t)


def row_products(
    d_out: torch.Tensor,
    full: torch.Tensor,
    log_total: torch.Tensor,
    q_valid: torch.Tensor | None,
) -> torch.Tensor:
    """D (b, h, t) of do and o (b, t, h, e), o contiguous; 0 in rows with all keys masked."""
    b, t, h, e = full.shape
    d_sum = torch.empty_like(log_total)
    rows = max(ELEMENTS // padded_width(e), 16)
    launch(
        _row_products, (cdiv(t, rows) * b * h,),
        heads(d_out), full, log_total, q_valid, d_sum, t, h,
        E=e, PADDED_E=padded_width(e), ROWS=rows,
    )  # fmt: skip
    return d_sum
