"""Reads: functions from attention weights and values to the output.

The ordinary read is the mean of the values under the weights,

    o = A v,    o_i = Σ_j a_ij v_j.

The other one is in `laser.py`. A read is passed log A, which is −∞ at masked pairs, so that it can
compute in log space. The output of a row in which all keys are masked is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from precondattn.arrays import Array, namespace
from precondattn.spec.array_functions import row_sum, transpose


class Read(Protocol):
    """A function from log weights (b, h, t, s) and values (b, h, s, e) to outputs (b, h, t, e)."""

    name: ClassVar[str]

    def forward(self, log_weights: Array, v: Array) -> Array: ...

    def backward(self, log_weights: Array, v: Array, o: Array, d_o: Array) -> tuple[Array, Array]:
        """The gradients of the scores (through the softmax) and of the values."""
        ...


@dataclass(frozen=True)
class Mean:
    """o = A v."""

    name: ClassVar[str] = "mean"

    def forward(self, log_weights: Array, v: Array) -> Array:
        return namespace(v).exp(log_weights) @ v

    def backward(self, log_weights: Array, v: Array, o: Array, d_o: Array) -> tuple[Array, Array]:
        """dS = A ∘ (dO vᵀ − rowsum(dO ∘ o)), dv = Aᵀ dO   (LASER Lemma 3.1)."""
        weights = namespace(v).exp(log_weights)
        d_scores = weights * (d_o @ transpose(v) - row_sum(d_o * o))
        return d_scores, transpose(weights) @ d_o


MEAN = Mean()
