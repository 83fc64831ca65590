"""The rounding of flash-linear-attention's delta rule, as a chunked form of the recurrence.

With G the sum of the log-decays of a chunk's tokens, D_ij = e^{G_i − G_j} and state h,

    M = (I + β stril(D ∘ k kᵀ))⁻¹,    u = M (β v) − M (β e^G k) h,
    o = e^G ∘ q h + tril(D ∘ q kᵀ) u,    h ← e^{G_C} h + kᵀ (e^{G_C − G} ∘ u).

States, decays and all sums are not rounded. Both factors of every product are rounded to the dtype
of the call; M, M (β v), M (β e^G k), u and their gradients are stored in it. Each gradient has the
products of its forward step, with the same rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

import precondattn as pa
from precondattn.spec.array_functions import solve_lower
from precondattn.spec.recurrence import AllTokens, Stream, StreamGradients
from precondattn_conformance.rounding.attention import Rounding

CHUNK = 64
NEVER = -1e5
"""A finite log-decay in place of −∞."""

Array = np.ndarray


class DeltaChunk(NamedTuple):
    """The inputs of a chunk of C tokens, the state before it, and what its gradient needs."""

    q: Array
    """(b, m, r, C, d)"""
    k: Array
    v: Array
    until: Array
    """G (b, m, C, 1)"""
    beta: Array
    """(b, m, C, 1)"""
    h: Array


class DeltaWrites(NamedTuple):
    """u (b, m, C, e), and the intermediate results that its gradient reads."""

    decay: Array
    """D, 0 above the diagonal (b, m, C, C)."""
    keys: Array
    """k kᵀ"""
    inverse: Array
    """M"""
    reader: Array
    """M (β e^G k) (b, m, C, d)"""
    u: Array


class RoundedDeltaRule(AllTokens):
    """The recurrence for outputs that are multiplied by a scale, with rounding."""

    def __init__(self, rounding: Rounding, scale: float) -> None:
        self.round, self.scale = rounding, scale

    def forward(self, x: Stream, state: Array) -> tuple[Array, Array]:
        h, outputs = state, []
        for part in _chunks(x):
            o, h = self._chunk(DeltaChunk(*part, h))
            outputs.append(o)
        return _tokens(outputs, x), h

    def vjp(self, x: Stream, state: Array, d_o: Array, d_final: Array) -> StreamGradients:
        parts = []
        for part in _chunks(x):
            parts.append(DeltaChunk(*part, state))
            state = self._chunk(parts[-1])[1]
        d_h, gradients = d_final, []
        for chunk, d_out in zip(parts[::-1], _in_chunks(_whole(d_o, x))[::-1], strict=True):
            *d, d_h = self._gradient(chunk, np.swapaxes(d_out, 2, 3), d_h)
            gradients.append(d)
        d_q, d_k, d_v, d_g, d_beta = zip(*gradients[::-1], strict=True)
        s = x.k.shape[2]
        k, v, g, beta = (np.concatenate(d, axis=2)[:, :, :s] for d in (d_k, d_v, d_g, d_beta))
        return StreamGradients(Stream(_tokens(d_q, x), k, v, g[..., None], beta[..., 0]), d_h)

    def _product(self, x: Array, y: Array) -> Array:
        return np.asarray(np.matmul(self.round(x), self.round(y)))

    def _written(self, x: DeltaChunk) -> DeltaWrites:
        keys = self._product(x.k, _t(x.k))
        decay = np.exp(np.where(np.tri(x.k.shape[-2]) > 0, x.until - _t(x.until), -np.inf))
        one = np.broadcast_to(np.eye(x.k.shape[2]), keys.shape)
        inverse = solve_lower(one + x.beta * np.tril(decay * keys, -1), one)
        values = self.round(self._product(inverse, x.beta * x.v))
        reader = self.round(self._product(inverse, x.beta * np.exp(x.until) * x.k))
        u = self.round(values - self._product(reader, x.h))
        return DeltaWrites(decay, keys, self.round(inverse), reader, u)

    def _chunk(self, x: DeltaChunk) -> tuple[Array, Array]:
        w = self._written(x)
        reading, writing = _gates(x)
        scores = w.decay[:, :, None] * self._product(x.q, _t(x.k)[:, :, None])
        o = reading[:, :, None] * self._product(x.q, x.h[:, :, None])
        o = o + self._product(scores, w.u[:, :, None])
        return self.scale * o, x.h * reading[:, :, -1:] + self._product(_t(x.k), writing * w.u)

    def _gradient(self, x: DeltaChunk, d_o: Array, d_next: Array) -> tuple[Array, ...]:
        """The gradients of q, k, v, g, β and of the state before the chunk."""
        w, (reading, writing), d_o = self._written(x), _gates(x), self.scale * d_o
        heads_k, heads_u = x.k[:, :, None], w.u[:, :, None]
        # o = e^G ∘ q h + S u, S = D ∘ q kᵀ
        pairs = self._product(x.q, _t(heads_k))
        d_pairs = np.tril(self._product(d_o, _t(heads_u)))
        d_until = _sum((d_o * self._product(x.q, x.h[:, :, None])).sum(2) * reading)
        d_decay = (d_pairs * pairs).sum(2)
        d_pairs = d_pairs * w.decay[:, :, None]
        d_read = reading[:, :, None] * d_o
        d_q = self._product(d_read, _t(x.h)[:, :, None]) + self._product(d_pairs, heads_k)
        d_k = self._product(_t(d_pairs), x.q).sum(2)
        d_u = self._product(_t(w.decay[:, :, None] * pairs), d_o).sum(2)
        d_h = self._product(_t(x.q), d_read).sum(2) + d_next * reading[:, :, -1:]
        # h' = e^{G_C} h + kᵀ (e^{G_C − G} ∘ u)
        d_k = d_k + self._product(writing * w.u, _t(d_next))
        d_weighted = writing * self._product(x.k, d_next)
        d_u = self.round(d_u + d_weighted)
        d_writing = _sum(d_weighted * w.u)
        d_last = np.sum(d_next * x.h, axis=(2, 3)) * reading[:, :, -1, 0] + d_writing.sum((2, 3))
        d_until = d_until - d_writing
        # u = M (β v) − M (β e^G k) h
        d_reader = self.round(-self._product(d_u, _t(x.h)))
        d_h = d_h - self._product(_t(w.reader), d_u)
        keys = reading * x.k
        d_inverse = self._product(d_u, _t(x.beta * x.v)) + self._product(
            d_reader, _t(x.beta * keys)
        )
        d_values = self._product(_t(w.inverse), d_u)
        d_keys = self._product(_t(w.inverse), d_reader)
        d_beta = _sum(d_values * x.v) + _sum(d_keys * keys)
        d_k = d_k + x.beta * reading * d_keys
        d_until = d_until + _sum(x.beta * d_keys * keys)
        # M = (I + β stril(D ∘ k kᵀ))⁻¹
        d_system = -_t(w.inverse) @ self.round(self.round(d_inverse) @ _t(w.inverse))
        d_system = np.tril(d_system, -1)
        d_beta = d_beta + _sum(d_system * w.decay * w.keys)
        d_decay = d_decay + x.beta * d_system * w.keys
        d_gram = x.beta * d_system * w.decay
        d_k = d_k + self._product(d_gram, x.k) + self._product(_t(d_gram), x.k)
        # D_ij = e^{G_i − G_j}, G = the running sum of g
        d_exponent = d_decay * w.decay
        d_until = d_until + _sum(d_exponent) - _sum(_t(d_exponent))
        d_until[:, :, -1, 0] += d_last
        d_g = np.cumsum(d_until[:, :, ::-1], axis=2)[:, :, ::-1]
        return d_q, d_k, x.beta * d_values, d_g, d_beta, d_h


def without_scale(
    leaf: pa.LinearFamily, d: int, rounding: Rounding
) -> tuple[pa.LinearFamily, RoundedDeltaRule]:
    """The leaf without its scale, and its rounding form, which scales outputs instead."""
    return replace(leaf, scale=1.0), RoundedDeltaRule(rounding, leaf.scale_for(d))


def _gates(x: DeltaChunk) -> tuple[Array, Array]:
    """e^G and e^{G_C − G} (b, m, C, 1)."""
    return np.exp(x.until), np.exp(x.until[:, :, -1:] - x.until)


def _chunks(x: Stream) -> list[tuple[Array, Array, Array, Array, Array]]:
    """q, k, v, G and β of each chunk; the last chunk is padded with zeros."""
    assert x.beta is not None
    g = np.maximum(x.g[..., 0], NEVER)
    parts = (_in_chunks(a) for a in (_whole(x.q, x), x.k, x.v, g, x.beta[..., None]))
    return [
        (np.swapaxes(q, 2, 3), k, v, np.cumsum(g, axis=2), beta)
        for q, k, v, g, beta in zip(*parts, strict=True)
    ]


def _whole(q: Array, x: Stream) -> Array:
    """Queries or their gradients (b, m, t, …), padded with leading zeros to one for every key."""
    missing = x.k.shape[2] - q.shape[2]
    return np.pad(q, [(missing if axis == 2 else 0, 0) for axis in range(q.ndim)])


def _in_chunks(x: Array) -> list[Array]:
    padding = -x.shape[2] % CHUNK
    x = np.pad(x, [(0, padding if axis == 2 else 0) for axis in range(x.ndim)])
    return np.split(x, x.shape[2] // CHUNK, axis=2)


def _tokens(chunks: Sequence[Array], x: Stream) -> Array:
    """The last t tokens (b, m, t, r, …) of chunks (b, m, r, C, …)."""
    joined = np.swapaxes(np.concatenate(chunks, axis=3), 2, 3)
    s, t = x.k.shape[2], x.q.shape[2]
    return joined[:, :, s - t : s]


def _t(x: Array) -> Array:
    return np.swapaxes(x, -1, -2)


def _sum(x: Array) -> Array:
    return np.asarray(np.sum(x, axis=-1, keepdims=True))
