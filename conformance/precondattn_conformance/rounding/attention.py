"""The rounding of flash attention, as reads for the leaves of softmax attention.

S = q kᵀ is summed in float32 and exponentiated in float32. P = e^{S − max S} is rounded to the
dtype of the call before P v; the sum by which P v is divided is that of P before its rounding.
Backward, dP = do vᵀ and dS = P ∘ (dP − D) are in float32, with D = rowsum(do ∘ o) of the output as
stored. P and dS are rounded before Pᵀ do, dS k and dSᵀ q.

LASER is flash attention over e^{v − max v}, rounded, where the maximum is over all keys.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import precondattn as pa
from precondattn.arrays import Array, namespace
from precondattn.spec.array_functions import finite_or_zero, row_sum, transpose
from precondattn.spec.laser import LOG_MEAN_EXP, LogMeanExp
from precondattn.spec.read import MEAN, Mean

Rounding = Callable[[Array], Array]
"""A function that rounds every element of an array and keeps its dtype."""


def _weighted_sum(log_weights: Array, v: Array, rounding: Rounding) -> Array:
    """A v = e^m P v, with m the largest log weight of a row."""
    xp = namespace(v)
    largest = finite_or_zero(xp.max(log_weights, axis=-1, keepdims=True))
    return xp.exp(largest) * (rounding(xp.exp(log_weights - largest)) @ v)


@dataclass(frozen=True)
class RoundedMean(Mean):
    """The read o = A v with rounding."""

    rounding: Rounding

    def forward(self, log_weights: Array, log_total: Array, v: Array) -> Array:
        return _weighted_sum(log_weights, v, self.rounding)

    def backward(self, log_weights: Array, v: Array, o: Array, d_o: Array) -> tuple[Array, Array]:
        weights = namespace(v).exp(log_weights)
        d_scores = weights * (d_o @ transpose(v) - row_sum(d_o * self.rounding(o)))
        return self.rounding(d_scores), transpose(self.rounding(weights)) @ d_o


@dataclass(frozen=True)
class RoundedLogMeanExp(LogMeanExp):
    """The read o = ν + log(A e^{v − ν}) with rounding, with ν the largest value of a channel."""

    rounding: Rounding

    def _exponentials(self, v: Array) -> tuple[Array, Array]:
        xp = namespace(v)
        shift = xp.max(v, axis=2, keepdims=True)
        return shift, self.rounding(xp.exp(v - shift))

    def forward(self, log_weights: Array, log_total: Array, v: Array) -> Array:
        xp = namespace(v)
        shift, exponentials = self._exponentials(v)
        mean = _weighted_sum(log_weights, exponentials, self.rounding)
        return xp.where(mean > 0, shift + xp.log(xp.where(mean > 0, mean, 1.0)), 0.0)

    def backward(self, log_weights: Array, v: Array, o: Array, d_o: Array) -> tuple[Array, Array]:
        xp = namespace(v)
        weights = xp.exp(log_weights)
        shift, exponentials = self._exponentials(v)
        d_mean = self.rounding(d_o * xp.exp(shift - o))
        d_scores = weights * (d_mean @ transpose(exponentials) - row_sum(d_o))
        d_exponentials = transpose(self.rounding(weights)) @ d_mean
        return self.rounding(d_scores), exponentials * d_exponentials


def rounded_attention(leaf: pa.Softmax | pa.Path, rounding: Rounding) -> pa.Softmax | pa.Path:
    """A leaf of softmax attention whose read rounds."""
    reading = {MEAN: RoundedMean, LOG_MEAN_EXP: RoundedLogMeanExp}[leaf.read](rounding)
    leaf = copy.copy(leaf)
    object.__setattr__(leaf, "read", reading)  # No value of the option `read` has this rounding.
    return leaf
