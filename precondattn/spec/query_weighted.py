"""CCQ with the covariance under the query's own softmax weights, in quadratic time.

    q^c_t = q̄_t − λ_t c_t,    c_t = Cov_p[k̄] q̄_t = Σ_j p_tj (s_tj − Σ_l p_tl s_tl) k̄_j,
    s_tj = q̄_t·k̄_j,    p_t = softmax_{j≤t}(s_tj / τ)

Cov_p is the Hessian of the softmax's log-partition function at q̄ (τ = 1). CCQ takes the Hessian at
0, which is the limit τ → ∞. Source: CCQ (arXiv 2606.01294) App. I and Eq. 11, where it is only a
remark; it is meant for comparisons, not for long sequences. Gradient, with g = dq^c, h = −λ g,
u_tj = h_t·k̄_j, and ũ, s̃ the centred u − Σ p u and s − Σ p s:

    ds = p∘ũ + p∘(s̃∘ũ − Σ p s̃ u) / τ,    dλ = −g·c,
    dq̄ = g + ds k̄,    dk̄ = (p∘s̃)ᵀ h + dsᵀ q̄.

Cache: the keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Flops, Inputs, Leaf, options
from precondattn.algebra.flops import state_flops
from precondattn.arrays import Array, Arrays, ByName, Residuals, namespace
from precondattn.cache import Append, Slot, Updates
from precondattn.frame import Frame
from precondattn.spec.array_functions import (
    mask_scores,
    repeat_heads,
    row_sum,
    softmax,
    sum_heads,
    swap_time_and_heads,
    transpose,
)
from precondattn.spec.l2_norm import l2_norm, l2_norm_vjp


@dataclass(frozen=True)
class QueryWeightedQuery(Leaf):
    """q^c = q̄ − λ Cov_p[k̄] q̄, with p = softmax(q̄·k̄ / τ) over the keys so far.

    It takes quadratic time in the number of tokens; this definition also takes quadratic memory.

    Source: CCQ (arXiv 2606.01294), App. I.

    Parameters
    ----------
    tau : float
        τ; 1 gives the Hessian of the log-partition function at q̄, and τ → ∞ gives CCQ.
    eps : float
        In the norm: L2(x) = x / √(‖x‖² + eps).

    Examples
    --------
    >>> import numpy as np
    >>> q, k = np.random.default_rng(0).normal(size=(2, 1, 5, 2, 4))
    >>> out = QueryWeightedQuery()(q, k, contraction=np.ones((1, 5, 2)))
    >>> bool(np.all(np.linalg.vector_norm(out, axis=-1) <= 1))
    True
    """

    name: ClassVar[str] = "query_weighted_query"
    role: ClassVar[str] = "piece"
    variants: ClassVar[tuple[str, ...]] = ("query_weighted_query[tau=0.3]",)

    tau: float = options.positive(1.0)
    eps: float = options.non_negative(1e-6)

    inputs = Inputs(q="b t h d", k="b s n d", contraction="b t h in [0, 1]")
    output = "b t h d"

    def flops(self, sizes: Mapping[str, int]) -> Flops | None:
        """The FLOPs of `ConditionedQuery`, which it is compared with."""
        d = sizes["d"]
        return state_flops(sizes["s"], d, d).times(sizes["h"])

    def _terms(self, x: ByName, keys: Array, frame: Frame) -> tuple[Array, ...]:
        """q̄, k̄, p, s̃ (b, h, t, s), c and λ for the new queries and all `keys` (b, s, n, d)."""
        q = swap_time_and_heads(l2_norm(x["q"], self.eps))
        k = repeat_heads(swap_time_and_heads(l2_norm(keys, self.eps)), q.shape[1])
        scores = q @ transpose(k)
        p = softmax(mask_scores(frame.visible(causal=True), scores / self.tau))
        centred = scores - row_sum(p * scores)
        contraction = swap_time_and_heads(x["contraction"])[..., None]
        return q, k, p, centred, (p * centred) @ k, contraction

    def _contracted(self, x: ByName, keys: Array, frame: Frame) -> Array:
        q, *_, c, contraction = self._terms(x, keys, frame)
        return swap_time_and_heads(q - contraction * c)

    def forward(self, x: ByName, frame: Frame) -> tuple[Array, Residuals]:
        return self._contracted(x, x["k"], frame), ()

    def backward(
        self, x: ByName, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        q, k, p, centred, c, contraction = self._terms(x, x["k"], frame)
        g = swap_time_and_heads(cotangent)
        h = -contraction * g
        u = h @ transpose(k)
        u = u - row_sum(p * u)
        covariance = row_sum(p * centred * u)
        d_s = p * u + p * (centred * u - covariance) / self.tau
        d_k = transpose(p * centred) @ h + transpose(d_s) @ q
        d_k = swap_time_and_heads(sum_heads(d_k, x["k"].shape[2]))
        return {
            "q": l2_norm_vjp(x["q"], self.eps, swap_time_and_heads(g + d_s @ k)),
            "k": l2_norm_vjp(x["k"], self.eps, d_k),
            "contraction": swap_time_and_heads(-row_sum(g * c))[..., 0],
        }

    def slots(self) -> tuple[Slot, ...]:
        return (Slot("key", "{k}", "b c n d"),)

    def step(self, past: ByName, x: ByName, frame: Frame) -> tuple[Array, Updates]:
        keys = namespace(x["k"]).concat([past["key"], x["k"]], axis=1)
        return self._contracted(x, keys, frame), {"key": Append(x["k"])}
