"""Nyström attention, with the two maps between tokens and landmarks for a few heads at a time.

    A = softmax(s q̃ k̃ᵀ),    Z ≈ A⁺                              for all heads together
    B = softmax(s q̃ kᵀ),    W = Z (B v),    F = softmax(s q k̃ᵀ),    o = F W

with landmarks q̃ and k̃. Backward recomputes B and F. With R = B v,

    dW = Fᵀ do,    dF = do Wᵀ,    dZ = dW Rᵀ,    dR = Zᵀ dW,    dB = dR vᵀ,    dv = Bᵀ dR
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import precondattn as pa
from precondattn.arrays import Array, Arrays, Index, namespace, zero_where_not
from precondattn.frame import Frame
from precondattn.spec.array_functions import (
    identity_like,
    mask_scores,
    repeat_heads,
    softmax,
    sum_heads,
    transpose,
)
from precondattn.spec.iterated_inverse import largest_sum
from precondattn.spec.nystrom import segment_means
from precondattn_portable import banded_convolution
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.layout import blocks, budget, only_at, time_first
from precondattn_portable.whole_sequence import WholeSequenceAlgorithm


class NystromKernels(WholeSequenceAlgorithm[pa.Nystrom]):
    """Algorithm of `Nystrom`."""

    name = "three kernels of landmarks"

    def attend(self, x: Arrays, frame: Frame) -> Array:
        ops, call = self.ops, NystromCall(self.ops, self.leaf, x, frame)
        outs = []
        for part in call.parts():
            w = ops.product(call.z[part], ops.product(call.from_landmarks(part), call.v[part]))
            outs.append(ops.product(call.to_landmarks(part), w))
        out = call.heads(_concatenated(outs))
        if self.leaf.skip:
            out = ops.add(out, banded_convolution.convolved(ops, call.values, x["skip"]))
        return time_first(out)

    def attend_vjp(self, x: Arrays, frame: Frame, cotangent: Array) -> Arrays:
        ops, leaf = self.ops, self.leaf
        call, n = NystromCall(ops, leaf, x, frame), x["k"].shape[2]
        d_out = time_first(cotangent)
        d_o = call.flat(d_out)
        parts = [call.pulled(part, d_o[part]) for part in call.parts()]
        d = {name: _concatenated([of_part[name] for of_part in parts]) for name in parts[0]}
        d_a = steps_vjp(ops, call.a, call.steps, d["z"], of_all=leaf.start == "batch")
        d_a = ops.softmax_vjp(call.a, d_a)
        d_q_mean = ops.add_product(d["q_mean"], d_a, call.k_mean)
        d_k_mean = ops.add_product(d["k_mean"], transpose(d_a), call.q_mean)
        d_q = call.of_queries.add_gradient(call.heads(d["q"]), call.scale * call.heads(d_q_mean))
        d_k = call.of_keys.add_gradient(call.heads(d["k"]), call.scale * call.heads(d_k_mean))
        d_v, gradients = call.heads(d["v"]), {}
        if leaf.skip:
            d_skipped, gradients["skip"] = banded_convolution.convolved_vjp(
                ops, call.values, x["skip"], d_out
            )
            d_v = ops.add(d_v, d_skipped)
        return {
            "q": time_first(d_q),
            "k": time_first(sum_heads(d_k, n)),
            "v": time_first(sum_heads(only_at(frame.k_valid, d_v, axis=2), n)),
            **gradients,
        }


class NystromCall:
    """A call; its arrays have one axis for sequences and heads, (b h, tokens, ·), where not stated.

    Scores are products with landmarks that are multiplied by the scale.
    """

    def __init__(self, ops: Arithmetic, leaf: pa.Nystrom, x: Arrays, frame: Frame) -> None:
        self.ops, q_valid, k_valid = ops, frame.q_valid, frame.k_valid
        self.b, t, self.h, d = x["q"].shape
        self.scale = leaf.scale_for(d)
        q, k, v = (repeat_heads(time_first(x[name]), self.h) for name in "qkv")
        self.values = only_at(k_valid, v, axis=2)
        """(b, h, s, e)"""
        members = q_valid if t == k.shape[2] else None
        self.of_queries = Landmarks(ops, leaf.landmarks, q, q_valid, None)
        self.of_keys = Landmarks(ops, leaf.landmarks, k, members, k_valid)
        self.q, self.k, self.v = self.flat(q), self.flat(k), self.flat(self.values)
        self.q_mean = self.flat(self.of_queries.means_of(q))
        self.k_mean = self.flat(self.of_keys.means_of(k))
        self.has_query = self.by_head(self.of_queries.is_any)
        self.has_key = self.by_head(self.of_keys.is_any)
        self.is_key = self.by_head(k_valid)
        self.scaled_q_mean = self.scale * self.q_mean
        self.scaled_k_mean = self.scale * self.k_mean
        rows = self.scaled_q_mean
        self.a = self._softmax((...,), rows, self.k_mean, self.has_query, self.has_key)
        self.z, self.steps = steps(ops, self.a, leaf.iterations, of_all=leaf.start == "batch")

    def flat(self, x: Array) -> Array:
        """(b, h, …) as (b h, …)"""
        return namespace(x).reshape(x, (-1, *x.shape[2:]))

    def heads(self, x: Array) -> Array:
        """(b h, …) as (b, h, …)"""
        return namespace(x).reshape(x, (self.b, self.h, *x.shape[1:]))

    def by_head(self, mask: Array | None) -> Array | None:
        """(b or 1, n) as (b h, n)"""
        if mask is None:
            return None
        shape = (self.b, self.h, mask.shape[1])
        return self.flat(namespace(mask).broadcast_to(mask[:, None, :], shape))

    def parts(self) -> Iterator[Index]:
        """The index of some sequences and heads, whose kernels together fit a cache."""
        heads, m = self.q.shape[0], self.a.shape[1]
        sizes = heads, self.q.shape[1], self.k.shape[1]
        if not all(isinstance(size, int) for size in sizes):
            yield slice(None), ...  # Symbolic sizes can not be counted while they are traced.
            return
        entries = m * max(sizes[1:])
        at_once = max(budget(self.ops.sizes.row_block_entries) // entries, 1)
        for start, stop in blocks(heads, at_once):
            yield slice(start, stop), ...

    def to_landmarks(self, part: Index) -> Array:
        """F (heads, t, m)"""
        return self._softmax(part, self.q[part], self.scaled_k_mean[part], None, self.has_key)

    def from_landmarks(self, part: Index) -> Array:
        """B (heads, m, s)"""
        rows = self.scaled_q_mean[part]
        return self._softmax(part, rows, self.k[part], self.has_query, self.is_key)

    def _softmax(
        self, part: Index, rows: Array, keys: Array, is_row: Array | None, is_key: Array | None
    ) -> Array:
        """The softmax of rows keysᵀ, 0 at rows and keys that are not there."""
        scores = self.ops.product(rows, transpose(keys))
        if is_row is None and is_key is None:
            return self.ops.softmax(scores)
        if is_key is not None:
            scores = mask_scores(is_key[part][:, None, :], scores)
        weights = softmax(scores)
        return weights if is_row is None else zero_where_not(is_row[part][:, :, None], weights)

    def pulled(self, part: Index, d_o: Array) -> Arrays:
        """Gradients of some heads; those of the landmarks are divided by the scale."""
        ops, v, z = self.ops, self.v[part], self.z[part]
        b, f = self.from_landmarks(part), self.to_landmarks(part)
        weighted = ops.product(b, v)
        d_w = ops.product(transpose(f), d_o)
        d_read = ops.product(transpose(z), d_w)
        d_f = ops.softmax_vjp(f, ops.product(d_o, transpose(ops.product(z, weighted))))
        d_b = ops.softmax_vjp(b, ops.product(d_read, transpose(v)))
        return {
            "q": ops.product(d_f, self.scaled_k_mean[part]),
            "k": ops.product(transpose(d_b), self.scaled_q_mean[part]),
            "v": ops.product(transpose(b), d_read),
            "q_mean": ops.product(d_b, self.k[part]),
            "k_mean": ops.product(transpose(d_f), self.q[part]),
            "z": ops.product(d_w, transpose(weighted)),
        }


def _concatenated(parts: Sequence[Array]) -> Array:
    return parts[0] if len(parts) == 1 else namespace(parts[0]).concat(list(parts), axis=0)


class Landmarks:
    """The means of m segments of rows like x (b, h, tokens, d): x̃ = M x, dx += Mᵀ dx̃.

    Where all tokens count and m divides their number, segments are an axis. Elsewhere M is a
    matrix, (b or 1, 1, m, tokens).
    """

    def __init__(
        self, ops: Arithmetic, m: int, x: Array, members: Array | None, counted: Array | None
    ) -> None:
        self.ops, self.m = ops, m
        self.each = x.shape[2] // m
        """Tokens of a segment"""
        is_whole = members is None and counted is None and not x.shape[2] % m
        self.means = None if is_whole else segment_means(m, x, members, counted)
        self.is_any = None if self.means is None else self.means.is_any
        """Which landmarks exist (b or 1, m); None if all do."""

    def means_of(self, x: Array) -> Array:
        """x̃ (b, h, m, d)"""
        if self.means is not None:
            return self.ops.product(self.means.matrix, x)
        xp, (b, h, _, d) = namespace(x), x.shape
        return xp.mean(xp.reshape(x, (b, h, self.m, self.each, d)), axis=3)

    def add_gradient(self, d_x: Array, d_mean: Array) -> Array:
        """dx + Mᵀ dx̃, in dx where the library can."""
        if self.means is not None:
            return self.ops.add(d_x, self.ops.product(transpose(self.means.matrix), d_mean))
        xp = namespace(d_x)
        segments = xp.reshape(d_x, (*d_x.shape[:2], self.m, self.each, d_x.shape[3]))
        total = self.ops.add(segments, d_mean[:, :, :, None, :] / self.each)
        return xp.reshape(total, d_x.shape)


Steps = list[tuple[Array, Array, Array]]
"""Z, X and P of each step Z' = ¼ Z P, which the gradient reads."""


def steps(ops: Arithmetic, a: Array, iterations: int, *, of_all: bool) -> tuple[Array, Steps]:
    """Z ≈ A⁺ of matrices (…, m, m), and the steps to it."""
    c, _ = largest_sum(a, of_all=of_all)
    z, one = transpose(a) / c, identity_like(a)
    done: Steps = []
    for _ in range(iterations):
        x = ops.product(a, z)
        p = ops.product(x, 7.0 * one - x)
        p = ops.product(x, 15.0 * one - p)
        p = 13.0 * one - p
        done.append((z, x, p))
        z = 0.25 * ops.product(z, p)
    return z, done


def steps_vjp(ops: Arithmetic, a: Array, done: Steps, d_z: Array, *, of_all: bool) -> Array:
    """The gradient of A, from that of Z.

    With U = dP Xᵀ and V = Xᵀ dP, a step takes eight products of m × m matrices:

        dX = 7 (U + V) − U Xᵀ − Xᵀ (U + V) − 15 dP
    """
    xp = namespace(a)
    d_a = ops.zeros(a.shape, a)
    for z, x, p in reversed(done):
        d_z = 0.25 * d_z
        d_p, x_t = ops.product(transpose(z), d_z), transpose(x)
        u = ops.product(d_p, x_t)
        both = u + ops.product(x_t, d_p)
        d_x = ops.add_product(7.0 * both - 15.0 * d_p, u, x_t, -1.0)
        d_x = ops.add_product(d_x, x_t, both, -1.0)
        d_a = ops.add_product(d_a, d_x, transpose(z))
        d_z = ops.add_product(ops.product(d_z, transpose(p)), transpose(a), d_x)
    c, share = largest_sum(a, of_all=of_all)
    axes = tuple(range(a.ndim)) if of_all else (-2, -1)
    d_c = -xp.sum(d_z * done[0][0], axis=axes, keepdims=True) / c
    return d_a + transpose(d_z) / c + d_c * share
