"""Channel attention (DaViT): each sum over tokens is one product, a d × d matrix.

A = softmax(s qᵀ k),    o = v Aᵀ
dL = s A ∘ (dA − rowsum(dA ∘ A)) with dA = doᵀ v:    dq = k dLᵀ,  dk = q dL,  dv = do A
"""

from __future__ import annotations

import precondattn as pa
from precondattn.arrays import Array, Arrays
from precondattn.frame import Frame
from precondattn.spec.array_functions import repeat_heads, sum_heads, transpose
from precondattn.spec.whole_sequence import valid_as_both
from precondattn_portable.layout import only_at, time_first
from precondattn_portable.whole_sequence import WholeSequenceAlgorithm


class ChannelProducts(WholeSequenceAlgorithm[pa.Channel]):
    """Algorithm of `Channel`."""

    name = "products over a sequence"

    def attend(self, x: Arrays, frame: Frame) -> Array:
        q, k, v = self._rows(x, frame)
        weights = self._weights(q, k, frame)
        out = self.ops.time_first(v.shape, v, 2) if self.ops.writes else None
        return time_first(self.ops.product(v, transpose(weights), out))

    def attend_vjp(self, x: Arrays, frame: Frame, cotangent: Array) -> Arrays:
        ops, n, valid = self.ops, x["k"].shape[2], valid_as_both(frame.q_valid, frame.k_valid)
        q, k, v = self._rows(x, frame)
        weights = self._weights(q, k, frame)
        d_o = only_at(valid, ops.heads_first(cotangent), axis=2)
        d_logits = ops.softmax_vjp(weights, ops.product(transpose(d_o), v))
        d_logits = d_logits * self.leaf.factor(q, valid)
        return {
            "q": time_first(ops.product(k, transpose(d_logits))),
            "k": time_first(sum_heads(ops.product(q, d_logits), n)),
            "v": time_first(sum_heads(ops.product(d_o, weights), n)),
        }

    def _weights(self, q: Array, k: Array, frame: Frame) -> Array:
        factor = self.leaf.factor(q, valid_as_both(frame.q_valid, frame.k_valid))
        return self.ops.softmax(self.ops.product(transpose(q), k) * factor)

    def _rows(self, x: Arrays, frame: Frame) -> tuple[Array, Array, Array]:
        """q, k and v (b, h, t, d), 0 at masked tokens."""
        h, valid = x["q"].shape[2], valid_as_both(frame.q_valid, frame.k_valid)
        q, k, v = (only_at(valid, self.ops.heads_first(x[name]), axis=2) for name in "qkv")
        return q, repeat_heads(k, h), repeat_heads(v, h)
