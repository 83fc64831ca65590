"""DeltaFormer: attention to values from which each token has removed what earlier tokens predict.

    u_t = v_t − β_t Σ_{j<t} P_tj u_j,    P = softmax(s q kᵀ + strict causal mask)
    o_t = Σ_{j≤t} A_tj u_j,              A = softmax(s q kᵀ + causal mask)

so (I + diag(β) P) u = v, a triangular solve as LUCID's (`lucid.py`), with the rows of a softmax in
place of the similarities of keys. Source: Zhong et al. 2025 (arXiv 2505.19488); the function is
that of flash-linear-attention's `naive_deltaformer_attn`. P depends on the query, so each query
head has its own u. With β = 0 it is softmax attention. For β in [0, 1], ‖u_t‖ ≤ t max ‖v‖.

A is P with one more column: with w = P u and a_t = Σ_{j<t} A_tj,

    o_t = a_t w_t + (1 − a_t) u_t,

in which the read of u costs nothing more than its solve.

Gradient, with du = Aᵀ do and (I + diag(β) P)ᵀ x = du:

    dv = x,    dβ_t = −x_t·w_t,    dP = −(β∘x) uᵀ,    dA = do uᵀ,

each through its own softmax to the same scores.

Cache: the keys, and u in place of the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Flops, Inputs, Leaf, Offers, options
from precondattn.algebra.flops import pair_flops, visible_pairs
from precondattn.arrays import Array, Arrays, ByName, Residuals, namespace
from precondattn.cache import Append, Slot, Updates
from precondattn.frame import Frame
from precondattn.spec.array_functions import (
    identity_like,
    input_gradients,
    mask_scores,
    repeat_heads,
    row_sum,
    softmax,
    solve_lower,
    solve_upper,
    swap_time_and_heads,
    transpose,
)


@dataclass(frozen=True)
class DeltaFormer(Leaf):
    """DeltaFormer: o = A u, with (I + diag(β) P) u = v.

    A is the causal softmax of s q kᵀ, and P the same over the keys before the query's own. There is
    a query for every key; a masked token has neither, and its output is 0. Keys and values may have
    fewer heads than queries (n < h), but u has one head for each query head, which the cache holds.

    Source: Zhong et al. 2025 (arXiv 2505.19488).

    Parameters
    ----------
    scale : float, optional
        The factor s of the logits; d^{-1/2} by default.

    Examples
    --------
    With β = 0 it is softmax attention:

    >>> import numpy as np, precondattn as pa
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 4, 2, 8))
    >>> zero = np.zeros((1, 4, 2))
    >>> bool(np.allclose(pa.DeltaFormer()(q, k, v, beta=zero), pa.Softmax()(q, k, v)))
    True
    """

    name: ClassVar[str] = "deltaformer"
    variants: ClassVar[tuple[str, ...]] = ("deltaformer[scale=0.3]",)

    scale: float | None = options.positive_or_none()

    inputs = Inputs(q="b s h d", k="b s n d", v="b s n e", beta="b s h in [0, 1]")
    output = "b s h e"

    @property
    def offers(self) -> Offers:
        return Offers(scale=self.scale)

    def flops(self, sizes: Mapping[str, int]) -> Flops | None:
        """The FLOPs of attention: one product with u serves the solve and the read."""
        s = sizes["s"]
        return pair_flops(visible_pairs(s, s), s, sizes["d"], sizes["e"]).times(sizes["h"])

    def _maps(self, q: Array, k: Array, frame: Frame) -> tuple[Array, Array]:
        """P and A (b, h, t, s)."""
        scores = self.scale_for(q.shape[3]) * (q @ transpose(k))
        frame = frame.among_keys(q.shape[2])
        before = frame.visible(causal=True, strict=True)
        return (
            softmax(mask_scores(before, scores)),
            softmax(mask_scores(frame.visible(causal=True), scores)),
        )

    def _rows(self, x: ByName) -> tuple[Array, Array, Array, Array]:
        """q, k, v and β with heads before time, and as many of each."""
        q, k, v = (swap_time_and_heads(x[name]) for name in ("q", "k", "v"))
        h = q.shape[1]
        beta = swap_time_and_heads(x["beta"])[..., None]
        return q, repeat_heads(k, h), repeat_heads(v, h), beta

    def forward(self, x: ByName, frame: Frame) -> tuple[Array, Residuals]:
        q, k, v, beta = self._rows(x)
        before, weights = self._maps(q, k, frame)
        u = solve_lower(identity_like(before) + beta * before, v)
        return swap_time_and_heads(weights @ u), ()

    def backward(
        self, x: ByName, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        q, k, v, beta = self._rows(x)
        n, d = x["k"].shape[2], q.shape[3]
        o, d_o = swap_time_and_heads(out), swap_time_and_heads(cotangent)
        before, weights = self._maps(q, k, frame)
        matrix = identity_like(before) + beta * before
        u = solve_lower(matrix, v)
        w = before @ u
        d_v = solve_upper(transpose(matrix), transpose(weights) @ d_o)
        d_beta = -row_sum(d_v * w)
        d_scores = weights * (d_o @ transpose(u) - row_sum(d_o * o))
        # The sum of P ∘ dP over a row is β dβ.
        d_scores = d_scores - beta * before * (d_v @ transpose(u) + d_beta)
        d_scores = self.scale_for(d) * d_scores
        gradients = input_gradients(d_scores @ k, transpose(d_scores) @ q, d_v, n)
        return gradients | {"beta": swap_time_and_heads(d_beta[..., 0])}

    def slots(self) -> tuple[Slot, ...]:
        scale = "" if self.scale is None else f"[scale={options.text_of(self.scale)}]"
        solved = f"deltaformer{scale}.solved({{q}}, {{k}}, {{v}}, {{beta}})"
        return (Slot("key", "{k}", "b c n d"), Slot("solved", solved, "b c h e"))

    def step(self, past: ByName, x: ByName, frame: Frame) -> tuple[Array, Updates]:
        q, k, v, beta = self._rows(x)
        xp, h = namespace(q), q.shape[1]
        past_k = repeat_heads(swap_time_and_heads(past["key"]), h)
        past_u = swap_time_and_heads(past["solved"])
        before, weights = self._maps(q, xp.concat([past_k, k], axis=2), frame)
        capacity = past_u.shape[2]
        among_new = before[..., capacity:]
        right = v - beta * (before[..., :capacity] @ past_u)
        u = solve_lower(identity_like(among_new) + beta * among_new, right)
        o = weights[..., :capacity] @ past_u + weights[..., capacity:] @ u
        updates: Updates = {"key": Append(x["k"]), "solved": Append(swap_time_and_heads(u))}
        return swap_time_and_heads(o), updates
