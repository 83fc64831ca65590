"""Cross-covariance attention (XCA): attention between channels, which is linear in tokens.

    q̂ = q / ‖q‖,  k̂ = k / ‖k‖   (norms of channels, over tokens)
    A = softmax(γ q̂ᵀ k̂)  (d, d),    o_t = A v_t

γ is a factor for each head, the input `logit_scale`. Row i of A has the weights of the channels of
v in channel i of the output. Source: XCiT (arXiv 2106.09681), Eq. 1, whose τ is 1/γ.

Gradient, with dA = doᵀ v and dL = A ∘ (dA − rowsum(dA ∘ A)):

    dv = do A,    dγ = Σ dL ∘ q̂ᵀ k̂,    dq̂ = γ k̂ dLᵀ,    dk̂ = γ q̂ dL,

and the gradient of the norms (`l2_norm.py`).

A token that `lengths` or `key_mask` masks is taken out of norms and products. Its output is 0: it
would be a mean of its own values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Inputs, Offers, options
from precondattn.arrays import Array, Arrays, ByName, namespace
from precondattn.spec.array_functions import (
    input_gradients,
    softmax,
    softmax_vjp,
    swap_time_and_heads,
    transpose,
)
from precondattn.spec.channel import BetweenChannels
from precondattn.spec.l2_norm import l2_norm, l2_norm_vjp
from precondattn.spec.whole_sequence import only_valid, valid_as_both, valid_rows


@dataclass(frozen=True)
class CrossCovariance(BetweenChannels):
    """Attention between channels: o_t = softmax(γ q̂ᵀ k̂) v_t.

    A row of the attention matrix is a channel, and `row_normalized` makes each channel of the
    output 1 long over the tokens. With fewer key/value heads than query heads (n < h), query head i
    reads key/value head ⌊i n / h⌋. Queries and keys are those of the same tokens, and values are as
    wide as keys. It is not causal and has no cache.

    Source: XCiT (arXiv 2106.09681), Eq. 1.

    Parameters
    ----------
    eps : float
        ε in ‖q‖ = √(Σ_t q_t² + ε). The ε of public code, 1e-12 outside the root, is about 1e-24.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 50, 2, 4))
    >>> attn = pa.CrossCovariance()
    >>> out = attn(q, k, v, logit_scale=np.ones(2))
    >>> shuffled = attn(q[:, ::-1], k[:, ::-1], v[:, ::-1], logit_scale=np.ones(2))
    >>> bool(np.allclose(shuffled[:, ::-1], out))  # the order of the tokens has no effect
    True
    """

    name: ClassVar[str] = "cross_covariance"
    variants: ClassVar[tuple[str, ...]] = ("cross_covariance[eps=0.5]",)

    eps: float = options.non_negative(1e-6)

    inputs = Inputs(q="b t h d", k="b s n d", v="b s n d", logit_scale="h")

    offers = Offers(causal=False, row_axis="channel", normalizes_query=True)

    def _logits(self, x: ByName, q: Array, k: Array) -> tuple[Array, Array, Array]:
        """q̂ᵀ and k̂ᵀ (b, h, d, t), and q̂ᵀ k̂."""
        q_unit, k_unit = (l2_norm(transpose(each), self.eps) for each in (q, k))
        return q_unit, k_unit, q_unit @ transpose(k_unit)

    def attend(self, x: ByName, q_valid: Array | None, k_valid: Array | None) -> Array:
        q, k, v = valid_rows(x, valid_as_both(q_valid, k_valid))
        weights = softmax(x["logit_scale"][None, :, None, None] * self._logits(x, q, k)[2])
        return swap_time_and_heads(v @ transpose(weights))

    def attend_vjp(
        self, x: ByName, q_valid: Array | None, k_valid: Array | None, cotangent: Array
    ) -> Arrays:
        xp, n = namespace(cotangent), x["k"].shape[2]
        valid, factor = valid_as_both(q_valid, k_valid), x["logit_scale"][None, :, None, None]
        q, k, v = valid_rows(x, valid)
        q_unit, k_unit, cosines = self._logits(x, q, k)
        weights = softmax(factor * cosines)
        d_o = only_valid(valid, swap_time_and_heads(cotangent))
        d_logits = softmax_vjp(weights, transpose(d_o) @ v)
        d_q = l2_norm_vjp(transpose(q), self.eps, factor * d_logits @ k_unit)
        d_k = l2_norm_vjp(transpose(k), self.eps, factor * transpose(d_logits) @ q_unit)
        d_q, d_k, d_v = (
            only_valid(valid, each) for each in (transpose(d_q), transpose(d_k), d_o @ weights)
        )
        d_scale = xp.sum(d_logits * cosines, axis=(0, 2, 3))
        return input_gradients(d_q, d_k, d_v, n) | {"logit_scale": d_scale}
