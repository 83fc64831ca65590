"""Attention sinks: one more column in the denominator of a softmax, without a value.

    A_ij = e^{S_ij − λ_i},    λ_i = log(e^σ + Σ_l e^{S_il}),    o = A v

with a learnt logit σ for each query head. The weights of a row sum to 1 − p_i, p_i = e^{σ − λ_i};
a row without visible keys has λ = σ and o = 0. Sources: gpt-oss (arXiv 2508.10925) 2; Xiao et al.
2023 (arXiv 2309.17453), where the sink has a key and a value.

Gradient, with D_i = rowsum(dO ∘ o) and the cotangent dλ of λ, where λ is returned:

    dS = A ∘ (dO vᵀ − D + dλ),    dσ = Σ_i p_i (dλ_i − D_i).

The first is that without a sink.
"""

from __future__ import annotations

from precondattn.arrays import Array, namespace


def column(sink: Array) -> Array:
    """σ (h,) beside the scores (b, h, t, s)."""
    return sink[None, :, None, None]


def sink_vjp(sink: Array, log_total: Array, d_log_total: Array) -> Array:
    """dσ (h,) from λ (b, h, t, 1) and the cotangent of λ through all of its uses."""
    xp = namespace(log_total)
    return xp.sum(xp.exp(column(sink) - log_total) * d_log_total, axis=(0, 2, 3))
