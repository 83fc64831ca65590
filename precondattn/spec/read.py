"""Reads: functions from attention weights and values to the output.

The ordinary read is the mean of the values under the weights,

    o = A v,    o_i = Σ_j a_ij v_j.

LASER's is in `laser.py`. A third one also returns the logarithm of each row's sum of weights,

    λ_i = log Σ_j e^{S_ij},

in the last channel of the output. A read is passed log A, which is −∞ at masked pairs, so that it
can compute in log space. The output of a row in which all keys are masked is 0, and its λ is −∞.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

from precondattn.arrays import Array, namespace, zero_where_not
from precondattn.spec.array_functions import row_sum, transpose


class Read(Protocol):
    """A function from log weights (b, h, t, s), λ (b, h, t, 1) and values (b, h, s, e) to outputs
    (b, h, t, e)."""

    name: ClassVar[str]

    def forward(self, log_weights: Array, log_total: Array, v: Array) -> Array: ...

    def backward(self, log_weights: Array, v: Array, o: Array, d_o: Array) -> tuple[Array, Array]:
        """The gradients of the scores (through the softmax) and of the values."""
        ...

    def d_log_total(self, o: Array, d_o: Array) -> Array:
        """The cotangent of λ (b, h, t, 1), by which all weights of a row are divided."""
        ...


@dataclass(frozen=True)
class Mean:
    """o = A v."""

    name: ClassVar[str] = "mean"

    def forward(self, log_weights: Array, log_total: Array, v: Array) -> Array:
        return namespace(v).exp(log_weights) @ v

    def backward(self, log_weights: Array, v: Array, o: Array, d_o: Array) -> tuple[Array, Array]:
        """dS = A ∘ (dO vᵀ − rowsum(dO ∘ o)), dv = Aᵀ dO   (LASER Lemma 3.1)."""
        weights = namespace(v).exp(log_weights)
        d_scores = weights * (d_o @ transpose(v) + self.d_log_total(o, d_o))
        return d_scores, transpose(weights) @ d_o

    def d_log_total(self, o: Array, d_o: Array) -> Array:
        return -row_sum(d_o * o)


@dataclass(frozen=True)
class MeanAndLogSum(Mean):
    """o = A v but for the last channel, which is λ. The last channel of v is not read."""

    name: ClassVar[str] = "mean_and_log_sum"

    def forward(self, log_weights: Array, log_total: Array, v: Array) -> Array:
        mean = super().forward(log_weights, log_total, v[..., :-1])
        return namespace(v).concat([mean, log_total], axis=-1)

    def backward(self, log_weights: Array, v: Array, o: Array, d_o: Array) -> tuple[Array, Array]:
        """The gradients of scores and values: dS = A ∘ (dO vᵀ − rowsum(dO ∘ o) + dλ)."""
        xp = namespace(v)
        weights = xp.exp(log_weights)
        d_mean = d_o[..., :-1]
        d_scores = weights * (d_mean @ transpose(v[..., :-1]) + self.d_log_total(o, d_o))
        d_v = transpose(weights) @ d_mean
        return d_scores, xp.concat([d_v, xp.zeros_like(d_v[..., :1])], axis=-1)

    def d_log_total(self, o: Array, d_o: Array) -> Array:
        sees_keys = o[..., -1:] > -math.inf  # Without keys λ is −∞, whatever its cotangent.
        d_last = zero_where_not(sees_keys, d_o[..., -1:])
        return d_last + super().d_log_total(o[..., :-1], d_o[..., :-1])


MEAN = Mean()
MEAN_AND_LOG_SUM = MeanAndLogSum()
