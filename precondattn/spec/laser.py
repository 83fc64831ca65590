"""LASER: attention in exponential value space.

    o = log(A eᵛ),    A = softmax(s q kᵀ)              (LASER Eq. 6)

elementwise, or, as one log-sum-exp over the visible keys j for each channel c,

    o_ic = log Σ_j exp(log a_ij + v_jc).

The second form is exact: it neither underflows nor overflows for any values, and the output of a
query does not depend on masked keys. This does not hold for the paper's Algorithm 1, which
subtracts a column maximum that includes future tokens.

With the posterior weights w_ijc = a_ij exp(v_jc − o_ic), Σ_j w_ijc = 1,

    dv_jc = Σ_i dO_ic w_ijc,    dS_ij = Σ_c dO_ic w_ijc − a_ij Σ_c dO_ic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.arrays import Array, namespace
from precondattn.spec.array_functions import finite_or_zero, log_sum_exp, row_sum


def _each_channel(log_weights: Array, v: Array) -> Array:
    """The exponents log a_ij + v_jc (b, h, t, s, e)."""
    return log_weights[..., None] + v[:, :, None, :, :]


@dataclass(frozen=True)
class LogMeanExp:
    """The read o = log(A eᵛ)."""

    name: ClassVar[str] = "log_mean_exp"

    def forward(self, log_weights: Array, log_total: Array, v: Array) -> Array:
        o = log_sum_exp(_each_channel(log_weights, v), axis=3)
        return finite_or_zero(o[:, :, :, 0, :])

    def backward(self, log_weights: Array, v: Array, o: Array, d_o: Array) -> tuple[Array, Array]:
        xp = namespace(v)
        posterior = xp.exp(_each_channel(log_weights, v) - o[:, :, :, None, :])
        weighted = d_o[:, :, :, None, :] * posterior
        d_scores = xp.sum(weighted, axis=-1) + xp.exp(log_weights) * self.d_log_total(o, d_o)
        return d_scores, xp.sum(weighted, axis=2)

    def d_log_total(self, o: Array, d_o: Array) -> Array:
        return -row_sum(d_o)


LOG_MEAN_EXP = LogMeanExp()

RANGE = {"float32": 60.0, "float64": 500.0}
"""The range R of a channel's values, by dtype, within which o = ν + log(A e^{v − ν}) is exact.

Every factor is then at least e^{−R}. Weights underflow below e^{−87} in float32 and e^{−708} in
float64, so the error is below rounding.
"""
