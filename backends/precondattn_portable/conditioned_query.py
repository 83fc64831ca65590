"""CCQ's conditioned query for one token or few, by direct formulas.

One token, on the cached sums C = n C, M = n μ and n, with α the decay:

    C = α C + k̄ k̄ᵀ,    M = α M + k̄,    n = α n + 1,    q^c = q̄ − λ/n (C q̄ − M (M·q̄)/n)

A full call of few tokens, with D the decay of pairs, 0 above the diagonal:

    C q̄ = (D ∘ q̄ k̄ᵀ) k̄,    M = D k̄,    n = D 1.

Arrays of one token are (b, m, r, …), for the r queries of m statistics; those of few, (b, h, t, …).
"""

from __future__ import annotations

import precondattn as pa
from precondattn.arrays import Array, Arrays, Residuals, namespace, placement
from precondattn.cache import Replace, Updates
from precondattn.frame import Frame
from precondattn.spec.array_functions import repeat_heads, row_sum, transpose, where_valid
from precondattn_portable.few_tokens import decay_of_pairs, is_few
from precondattn_portable.layout import time_first
from precondattn_portable.stateful import StatefulAlgorithm


class ConditionedQueryAlgorithm(StatefulAlgorithm[pa.ConditionedQuery]):
    """Algorithm of `ConditionedQuery`."""

    def forward(self, x: Arrays, frame: Frame) -> tuple[Array, Residuals]:
        return (self._of_few(x, frame), ()) if is_few(x) else super().forward(x, frame)

    def step(self, past: Arrays, x: Arrays, frame: Frame) -> tuple[Array, Updates]:
        if x["k"].shape[1] > 1:
            return super().step(past, x, frame)
        xp, ops = namespace(x["q"]), self.ops
        second, first = past["second"], past["first"][:, :, None, :]
        n = past["count"][..., None, None]
        if self.leaf.has_decay:
            kept = xp.exp(self.leaf.log_decay(x, frame)[:, :, 0, ...])
            second, first, n = second * kept, first * kept, n * kept
        (b, _, h, d), m = x["q"].shape, second.shape[1]
        q, k = self._units(x)
        q, k = xp.reshape(q, (b, m, h // m, d)), repeat_heads(where_valid(k, frame), m)
        contraction = xp.reshape(x["contraction"], (b, m, h // m, 1))
        second = ops.plus_product(second, transpose(k), k)
        first, n = first + k, n + _counted(k, frame)
        a, count = ops.product(q, second), _positive(n, 1, frame)
        out = self._contracted(a, first, count, q, contraction)
        state = {"second": second, "first": first[:, :, 0, :], "count": n[:, :, 0, 0]}
        updates: Updates = {name: Replace(value) for name, value in state.items()}
        return xp.reshape(out, x["q"].shape), updates

    def _of_few(self, x: Arrays, frame: Frame) -> Array:
        """q^c of a call of few tokens, with the statistics repeated for each query head."""
        ops, (_, t, h, _), s = self.ops, x["q"].shape, x["k"].shape[1]
        q, k = self._units(x)
        k, is_plain = repeat_heads(where_valid(k, frame), h), frame.valid_keys(s) is None
        scores = ops.product(q, transpose(k))
        if self.leaf.has_decay or frame.k_segment is not None:
            decay = decay_of_pairs(ops, self.leaf.log_decay(x, frame))[:, :, s - t :, :, 0]
            weights = repeat_heads(ops.lower(decay, s - t), h)
            scores = ops.multiply(scores, weights)
            total = ops.product(weights, k)
            n = row_sum(weights) if is_plain else weights @ _counted(k, frame)
        else:
            scores = ops.lower(scores, s - t)
            total = _running_sum(k, t)
            if is_plain:
                n = namespace(k).arange(s - t + 1, s + 1, dtype=k.dtype, **placement(k))[:, None]
            else:
                n = _running_sum(_counted(k, frame), t)
        a, n = ops.product(scores, k), _positive(n, s, frame)
        contraction = time_first(x["contraction"][..., None])
        return time_first(self._contracted(a, total, n, q, contraction))

    def _units(self, x: Arrays) -> tuple[Array, Array]:
        """q̄ (b, h, t, d) and k̄ (b, n, s, d), where possible by one norm of both."""
        unit_rows, eps = self.ops.unit_rows, self.leaf.eps
        q, k = time_first(x["q"]), time_first(x["k"])
        if q.shape[2] != k.shape[2]:
            return unit_rows(q, eps), unit_rows(k, eps)
        both = unit_rows(namespace(q).concat([q, k], axis=1), eps)
        return both[:, : q.shape[1], ...], both[:, q.shape[1] :, ...]

    def _contracted(self, a: Array, total: Array, n: Array, q: Array, contraction: Array) -> Array:
        """q̄ − λ/n (a − M (M·q̄)/n), of a = C q̄, which is overwritten."""
        minus_n = -n
        a = self.ops.add_multiple(a, total, row_sum(total * q) / minus_n)
        return self.ops.plus_product(q, a, contraction / minus_n)


def _counted(k: Array, frame: Frame) -> Array:
    """1 for every valid token (b, m, s, 1), 0 for others."""
    return where_valid(namespace(k).ones_like(k[..., :1]), frame)


def _running_sum(x: Array, t: int) -> Array:
    """The sums up to each of the last t tokens."""
    return namespace(x).cumulative_sum(x, axis=2)[:, :, x.shape[2] - t :, :]


def _positive(n: Array, tokens: int, frame: Frame) -> Array:
    """n, with 1 in place of 0 before the first valid token."""
    return n if frame.valid_keys(tokens) is None else namespace(n).where(n > 0, n, 1.0)
