"""Online softmax over tiles of scores, with row sums by tensor cores and a sink.

For the scores S of a tile in units of log 2, −∞ where masked, as in `score_tiles.py`:

    m' = max(m, max S),    P = 2^{S − m'},    l ← l 2^{m − m'} + P 1,    acc ← acc 2^{m − m'} + P V.

Weights P of 16 bits are multiplied by ones on tensor cores, in every one of `COLUMNS` equal
columns. Ordinary additions would first convert each weight to 16 bits and back, which takes as long
as its exponential.

A sink σ is one more column without a value. It is added after the last tile:

    m' = max(m, σ log₂ e),    l ← l 2^{m − m'} + e^σ 2^{−m'},    o = acc 2^{m − m'} / l.

A row without keys has o = 0, and λ = ∞ also with a sink: its weights are 0, and σ has no gradient
from it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.softmax.score_tiles import add_product, mean_and_log
from precondattn_triton.tiles import LOG2_E

COLUMNS = tl.constexpr(16)
"""The least width of a product."""


@triton.jit
def no_sums(FACTOR: tl.constexpr, ROWS: tl.constexpr):
    """l = 0, for weights in the dtype FACTOR."""
    WIDTH: tl.constexpr = 1 if tl.float32 == FACTOR else COLUMNS
    return tl.zeros((ROWS, WIDTH), tl.float32)


@triton.jit
def with_row_sums(total, shrink, p):
    """l after one more tile; `shrink` is (rows, 1)."""
    if p.dtype == tl.float32:
        total = total * shrink + tl.sum(p, 1, keep_dims=True)
    else:
        total = tl.dot(p, tl.full((p.shape[1], COLUMNS), 1.0, p.dtype), total * shrink)
    return total


@triton.jit
def row_sums(total):
    """l (rows)."""
    return tl.max(total, 1)


@triton.jit
def with_scores(
    largest, total, acc, scores, unit, values, PRECISION: tl.constexpr, TWO_PARTS: tl.constexpr
):
    """m, l (rows, COLUMNS) and acc after one more tile, of S = scores · unit.

    The unit is positive: it is multiplied into the largest score, and fused into the exponents.
    """
    higher = tl.maximum(largest, tl.max(scores, 1) * unit)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2(largest - base)[:, None]
    p = tl.exp2(scores * unit - base[:, None])
    if not TWO_PARTS:
        p = p.to(values.dtype)
    total = with_row_sums(total, shrink, p)
    if TWO_PARTS:
        acc = add_product(p, values, acc * shrink, PRECISION, True)
    else:
        acc = tl.dot(p, values, acc * shrink, input_precision=PRECISION)
    return higher, total, acc


@triton.jit
def mean_and_log_with_sink(largest, total, acc, is_row, sink, head):
    """o and λ of rows; `sink` is (h,), or None."""
    total = row_sums(total)
    if sink is not None:
        is_row = is_row & (total != 0)
        sigma = tl.load(sink + head).to(tl.float32) * LOG2_E
        base = tl.maximum(largest, sigma)
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.exp2(sigma - base)
        acc *= shrink[:, None]
        largest = base
    return mean_and_log(largest, total, acc, is_row)
