"""CCQ's conditioned query, of one token or of few: its sums as direct formulas.

One token, on the cached sums C = n C, M = n μ and n, with α the decay:

    C = α C + k̄ k̄ᵀ,    M = α M + k̄,    n = α n + 1,    q^c = q̄ − λ/n (C q̄ − M (M·q̄)/n)

A full call of few tokens, with D the decay of pairs, 0 above the diagonal:

    C q̄ = (D ∘ q̄ k̄ᵀ) k̄,    M = D k̄,    n = D 1.

Arrays have rows before tokens, (b, m, r, t, …), for the r queries of m statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from precondattn.arrays import Array, Residuals, namespace
from precondattn.cache import Replace, Updates
from precondattn.frame import Frame
from precondattn.spec.array_functions import repeat_heads, transpose, where_valid
from precondattn.spec.conditioned_query import contracted
from precondattn.spec.l2_norm import l2_norm
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.few_tokens import decay_of_pairs, is_few
from precondattn_portable.stateful import StatefulAlgorithm


class ConditionedQueryAlgorithm(StatefulAlgorithm):
    """Algorithm of `ConditionedQuery`."""

    def forward(
        self, ops: Arithmetic, leaf: Any, x: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        if not is_few(x):
            return super().forward(ops, leaf, x, frame)
        return _of_few_tokens(ops, leaf, x, frame), ()

    def step(
        self,
        ops: Arithmetic,
        leaf: Any,
        past: Mapping[str, Array],
        x: Mapping[str, Array],
        frame: Frame,
    ) -> tuple[Array, Updates]:
        if x["k"].shape[1] > 1:
            return super().step(ops, leaf, past, x, frame)
        return _of_one_token(ops, leaf, past, x, frame)


def _of_one_token(
    ops: Arithmetic, leaf: Any, past: Mapping[str, Array], x: Mapping[str, Array], frame: Frame
) -> tuple[Array, Updates]:
    xp = namespace(x["q"])
    second, first, n = past["second"], past["first"][:, :, None, :], past["count"][..., None, None]
    if leaf.has_decay:
        kept = xp.exp(leaf.log_decay(x, frame)[:, :, 0, ...])
        second, first, n = second * kept, first * kept, n * kept
    q, k, contraction = (a[:, :, :, 0, :] for a in _rows(leaf, x, frame, second.shape[1]))
    second = ops.plus_product(second, transpose(k), k)
    first, n = first + k, n + _counted(k, frame)
    (out,) = contracted(ops.product(q, second), first, n, q, contraction)
    state = {"second": second, "first": first[:, :, 0, :], "count": n[:, :, 0, 0]}
    updates: Updates = {name: Replace(value) for name, value in state.items()}
    return xp.reshape(out, x["q"].shape), updates


def _of_few_tokens(ops: Arithmetic, leaf: Any, x: Mapping[str, Array], frame: Frame) -> Array:
    xp, t, s = namespace(x["q"]), x["q"].shape[1], x["k"].shape[1]
    decays = leaf.has_decay or frame.k_segment is not None
    g = leaf.log_decay(x, frame) if decays else None
    heads = x["k"].shape[2] if g is None else g.shape[1]
    q, k, contraction = _rows(leaf, x, frame, heads)
    k = k[:, :, 0, ...]
    b, m, r, _, d = q.shape
    counted = _counted(k, frame)
    scores = ops.product(xp.reshape(q, (b, m, r * t, d)), transpose(k))
    scores = ops.lower(xp.reshape(scores, (b, m, r, t, s)), s - t)
    if g is None:
        total = xp.cumulative_sum(k, axis=2)[:, :, s - t :, :]
        n = xp.cumulative_sum(xp.broadcast_to(counted, (b, m, s, 1)), axis=2)[:, :, s - t :, :]
    else:
        weights = ops.lower(decay_of_pairs(ops, g)[:, :, s - t :, :, 0], s - t)
        scores = ops.multiply(scores, weights[:, :, None, ...])
        total, n = ops.product(weights, k), xp.matmul(weights, counted)
    a = xp.reshape(ops.product(xp.reshape(scores, (b, m, r * t, s)), k), (b, m, r, t, d))
    (out,) = contracted(a, total[:, :, None, ...], n[:, :, None, ...], q, contraction)
    return xp.reshape(xp.permute_dims(out, (0, 3, 1, 2, 4)), x["q"].shape)


def _rows(leaf: Any, x: Mapping[str, Array], frame: Frame, m: int) -> tuple[Array, Array, Array]:
    """q̄ (b, m, r, t, d), k̄ (b, m, 1, s, d), 0 where masked, and λ (b, m, r, t, 1)."""
    xp = namespace(x["q"])

    def rows(a: Array) -> Array:
        b, t, h, *rest = a.shape
        a = xp.reshape(a, (b, t, m, h // m, *rest))
        return xp.permute_dims(a, (0, 2, 3, 1, 4))

    q, k = _units(leaf, x)
    k = repeat_heads(where_valid(xp.permute_dims(k, (0, 2, 1, 3)), frame), m)
    return rows(q), k[:, :, None, ...], rows(x["contraction"][..., None])


def _units(leaf: Any, x: Mapping[str, Array]) -> tuple[Array, Array]:
    """q̄ and k̄, where possible by one norm of both."""
    q, k = x["q"], x["k"]
    if q.shape[1] != k.shape[1]:
        return l2_norm(q, leaf.eps), l2_norm(k, leaf.eps)
    both = l2_norm(namespace(q).concat([q, k], axis=2), leaf.eps)
    return both[:, :, : q.shape[2], :], both[:, :, q.shape[2] :, :]


def _counted(k: Array, frame: Frame) -> Array:
    """1 for every valid token (b, m, s, 1), 0 for others."""
    return where_valid(namespace(k).ones_like(k[..., :1]), frame)
