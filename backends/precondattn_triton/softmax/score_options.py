"""The options of softmax attention that change a score, on a tile of scores.

    S = cap(s ⟨q, k⟩) + bias − m |i − j|,    cap(x) = c tanh(x / c)

in units of log 2 before the mask, with i and j the positions of query and key. An option that is
None is no code in a kernel. The derivatives, given dS = A ∘ (do vᵀ − D):

    d(s ⟨q, k⟩) = dS (1 − tanh²),    dbias = dS,    dm = −Σ |i − j| dS_ij.

A window is not added to scores; `reach.py` has its masks. A sink is a column of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from precondattn.spec.softmax import SoftmaxAttention
from precondattn_triton.tiles import LOG2_E

NO_WINDOW = 1 << 30
"""A window of more tokens is none: no sequence is longer."""

SERIES_END = tl.constexpr(0.625)
"""Up to here tanh is a series, since 1 − 2 / (1 + e^{2x}) would lose its digits."""


class ScoreOptions(NamedTuple):
    """The options of a call, as kernels read them; None where one is not used."""

    softcap: float | None = None
    window: int | None = None
    bias: torch.Tensor | None = None
    """(b, h, t, s), a view with stride 0 along axes that it is broadcast along"""
    slopes: torch.Tensor | None = None
    """(h,), contiguous"""
    bias_batch: int = 0
    bias_head: int = 0
    bias_row: int = 0
    bias_column: int = 0


def options_of(
    leaf: SoftmaxAttention, x: Mapping[str, torch.Tensor], b: int, h: int
) -> ScoreOptions:
    """The options of a leaf, from its inputs `bias` (b or 1, h or 1, t, s) and `slopes` (h,)."""
    window = None if leaf.window is None or leaf.window > NO_WINDOW else leaf.window
    bias = x["bias"].expand(b, h, -1, -1) if leaf.bias else None
    slopes = x["slopes"].contiguous() if leaf.distance == "slopes" else None
    strides = () if bias is None else bias.stride()
    return ScoreOptions(leaf.softcap, window, bias, slopes, *strides)


@triton.jit
def bounded(x, EXACT: tl.constexpr):
    """tanh x and its derivative; to the last digit of small x too if EXACT."""
    rest = 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E)))  # 1 − tanh x
    result = 1.0 - rest
    slope = rest * (2.0 - rest)
    if EXACT:
        y = x * x
        series = (2.06390887954e-2 - 5.70498872745e-3 * y) * y - 5.37397155531e-2
        series = (series * y + 1.33314422036e-1) * y - 3.33332819422e-1
        small = x + x * (y * series)
        is_small = tl.abs(x) < SERIES_END
        result = tl.where(is_small, small, result)
        slope = tl.where(is_small, (1.0 - small) * (1.0 + small), slope)
    return result, slope


@triton.jit
def distances(row, column, t, s):
    """|i − j| of pairs, float32."""
    return tl.abs(row + (s - t) - column).to(tl.float32)


@triton.jit
def scores_in_units(
    products, row, column, is_pair, batch, head, t, s, scale, scoring, EXACT: tl.constexpr
):
    """S as scores and their unit, which is positive; 1 where an option is added to the scores."""
    unit = 1.0
    if scoring.softcap is None and scoring.bias is None and scoring.slopes is None:
        scores, unit = products, scale * LOG2_E
    else:
        scores, _slope = scores_and_slopes(
            products, row, column, is_pair, batch, head, t, s, scale, scoring, EXACT
        )
    return scores, unit


@triton.jit
def scores_and_slopes(
    products, row, column, is_pair, batch, head, t, s, scale, scoring,
    EXACT: tl.constexpr, shift=0.0,
):  # fmt: skip
    """S − shift in units of log 2 from ⟨q, k⟩, and the slopes of the cap, which are 1 without one.

    `row` and `column` broadcast to the tile, which may be transposed. Where not `is_pair`, the bias
    is not read. A shift is subtracted first, as a part of a fused product.
    """
    slope = 1.0
    if scoring.softcap is None:
        scores = products * (scale * LOG2_E) - shift
    else:
        capped, slope = bounded(products * (scale / scoring.softcap), EXACT)
        scores = capped * (scoring.softcap * LOG2_E) - shift
    if scoring.bias is not None:
        at = scoring.bias + batch * scoring.bias_batch + head * scoring.bias_head
        at += row.to(tl.int64) * scoring.bias_row + column.to(tl.int64) * scoring.bias_column
        scores += tl.load(at, mask=is_pair, other=0.0).to(tl.float32) * LOG2_E
    if scoring.slopes is not None:
        m = tl.load(scoring.slopes + head).to(tl.float32) * LOG2_E
        scores -= m * distances(row, column, t, s)
    return scores, slope
