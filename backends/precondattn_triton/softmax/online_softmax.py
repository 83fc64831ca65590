"""Online softmax over tiles of scores, with row sums by tensor cores and a sink.

For the scores S of a tile in units of log 2, −∞ where masked, as in `score_tiles.py`:

    m' = max(m, max S),    P = 2^{S − m'},    l ← l 2^{m − m'} + P 1,    acc ← acc 2^{m − m'} + P V.

A sink σ is one more column without a value. It is added after the last tile:

    m' = max(m, σ log₂ e),    l ← l 2^{m − m'} + e^σ 2^{−m'},    o = acc 2^{m − m'} / l.

A row without keys has o = 0, and λ = ∞ also with a sink: its weights are 0, and σ has no gradient
from it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.softmax.row_sums import row_sums, with_row_sums
from precondattn_triton.softmax.score_tiles import add_product, mean_and_log
from precondattn_triton.tiles import LOG2_E


@triton.jit
def with_scores(
    largest, total, acc, scores, unit, values, PRECISION: tl.constexpr, TWO_PARTS: tl.constexpr
):
    """m, l (rows, columns of `row_sums.py`) and acc after one more tile, of S = scores · unit.

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
