"""Cross-covariance attention (XCiT): each sum over tokens is one product, a d × d matrix.

    C = q̂ᵀ k̂,    A = softmax(γ C),    o = v Aᵀ

Backward, with dA = doᵀ v, dL = A ∘ (dA − rowsum(dA ∘ A)) and dC = γ dL. The gradient of the norms
needs no more sums over tokens, since Σ_t q̂_ti dq̂_ti = Σ_j dC_ij C_ij:

    dq = (k̂ dCᵀ − q̂ diag(rowsum(dC ∘ C))) / ‖q‖,    dk = (q̂ dC − k̂ diag(colsum(dC ∘ C))) / ‖k‖
    dv = do A,    dγ = Σ dL ∘ C

Division by a norm is a factor of the d × d matrices.
"""

from __future__ import annotations

import precondattn as pa
from precondattn.arrays import Array, Arrays, namespace
from precondattn.frame import Frame
from precondattn.spec.array_functions import repeat_heads, row_sum, sum_heads, transpose
from precondattn.spec.whole_sequence import valid_as_both
from precondattn_portable.layout import only_at, time_first
from precondattn_portable.whole_sequence import WholeSequenceAlgorithm


class CrossCovarianceProducts(WholeSequenceAlgorithm[pa.CrossCovariance]):
    """Algorithm of `CrossCovariance`."""

    name = "products over a sequence"

    def attend(self, x: Arrays, frame: Frame) -> Array:
        ops, valid, h = self.ops, valid_as_both(frame.q_valid, frame.k_valid), x["q"].shape[2]
        q, k = (self._channels(valid, x[name], h)[0] for name in "qk")
        v = repeat_heads(self._rows(valid, x["v"]), h)
        weights = ops.softmax(x["logit_scale"][None, :, None, None] * ops.product(transpose(q), k))
        out = ops.time_first(v.shape, v, 2) if ops.writes else None
        return time_first(ops.product(v, transpose(weights), out))

    def attend_vjp(self, x: Arrays, frame: Frame, cotangent: Array) -> Arrays:
        ops, valid, xp = self.ops, valid_as_both(frame.q_valid, frame.k_valid), namespace(cotangent)
        h, n, gamma = x["q"].shape[2], x["k"].shape[2], x["logit_scale"][None, :, None, None]
        (q, q_length), (k, k_length) = (self._channels(valid, x[name], h) for name in "qk")
        v, d_o = repeat_heads(self._rows(valid, x["v"]), h), self._rows(valid, cotangent)
        cosines = ops.product(transpose(q), k)
        weights = ops.softmax(gamma * cosines)
        d_logits = ops.softmax_vjp(weights, ops.product(transpose(d_o), v))
        of_scale = d_logits * cosines
        of_norms, d_cosines = gamma * of_scale, gamma * d_logits
        of_q = transpose(row_sum(of_norms)) / q_length
        of_k = xp.sum(of_norms, axis=2, keepdims=True) / k_length
        d_q = ops.add_product(-(q * of_q), k, transpose(d_cosines) / q_length)
        d_k = ops.add_product(-(k * of_k), q, d_cosines / k_length)
        d_v = ops.product(d_o, weights)
        return {
            "q": time_first(only_at(valid, d_q, axis=2)),
            "k": time_first(sum_heads(only_at(valid, d_k, axis=2), n)),
            "v": time_first(sum_heads(d_v, n)),
            "logit_scale": xp.sum(of_scale, axis=(0, 2, 3)),
        }

    def _rows(self, valid: Array | None, x: Array) -> Array:
        """An array as (b, h, t, d), 0 at masked tokens."""
        return only_at(valid, self.ops.heads_first(x), axis=2)

    def _channels(self, valid: Array | None, x: Array, h: int) -> tuple[Array, Array]:
        """Channels divided by their lengths (b, h, t, d), and the lengths (b, h, 1, d)."""
        rows = self._rows(valid, x)
        length = self.ops.channel_lengths(rows, self.leaf.eps)
        return repeat_heads(rows / length, h), repeat_heads(length, h)
