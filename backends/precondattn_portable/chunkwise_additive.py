"""Reads and writes of chunks for additive states, and their gradients.

    O = reading ∘ Q S + (D ∘ Q Kᵀ) V,    S ← total ∘ S + (writing ∘ K)ᵀ V

with D from `head_decay.py`, or for each key channel (`channel_decay.py`), or for each value
channel, where `reading` multiplies the columns of Q S and `writing` those of V. Gradients, with dS
that of the state after the chunk:

    dA = D ∘ dO Vᵀ,                    dV = Aᵀ dO + (writing ∘ K) dS,
    dQ = dA K + reading ∘ dO Sᵀ,       dK = dAᵀ Q + writing ∘ V dSᵀ,
    dS ← total ∘ dS + (reading ∘ Q)ᵀ dO.
"""

from __future__ import annotations

from typing import NamedTuple

from precondattn.arrays import Array, namespace
from precondattn.spec.array_functions import row_sum, transpose
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.channel_decay import ChannelDecay
from precondattn_portable.head_decay import HeadDecay, decayed, sums_before, sums_from
from precondattn_portable.in_place import add_kept_at, product_at


class WrittenChunks(NamedTuple):
    """The written inputs in chunks (c, n, C, …): chunks first, then the heads of all sequences."""

    k: Array
    """(c, n, C, d)"""
    v: Array
    """(c, n, C, e)"""
    g: Array | None
    """(c, n, C, 1, d or e); None without decay."""
    beta: Array | None
    """(c, n, C, 1)"""
    erase: Array | None = None
    """(c, n, C, d); None for k."""
    undecayed: Array | None = None
    """(c, n, C, d), in place of `erase`, if its value is read before the state decays."""


class ChunkGroup:
    """Chunks that are computed at once, except for the states between them."""

    def states(self, state: Array) -> Array:
        """The states before every chunk and after the last: (c + 1, n, d, e)."""
        raise NotImplementedError

    def read(self, q: Array, states: Array) -> Array:
        """The outputs (c, n, C, r, e) of queries (c, n, C, r, d). Only after `states`."""
        raise NotImplementedError

    def d_states(self, q: Array, d_o: Array, d_state: Array) -> Array:
        """The gradients of the states (c + 1, n, d, e)."""
        raise NotImplementedError

    def vjp(
        self, q: Array, d_o: Array, states: Array, d_states: Array
    ) -> tuple[Array, WrittenChunks]:
        """The gradients of the queries and of the written inputs. Only after `d_states`."""
        raise NotImplementedError


def flat(rows: Array) -> Array:
    """r rows a token (c, n, C, r, w) as (c, n, C r, w)."""
    c, n, size, r, width = rows.shape
    return namespace(rows).reshape(rows, (c, n, size * r, width))


def summed_rows(rows: Array) -> Array:
    """The sum over the r rows of a token, (c, n, C, r, w) to (c, n, C, w)."""
    return rows[:, :, :, 0, :] if rows.shape[3] == 1 else namespace(rows).sum(rows, axis=3)


def summed_pairs(pairs: Array) -> Array:
    """The sum over the r rows of a token, (c, n, C r, C) to (c, n, C, C)."""
    c, n, _, size = pairs.shape
    return summed_rows(namespace(pairs).reshape(pairs, (c, n, size, -1, size)))


class Additive(ChunkGroup):
    """What the variants of decay have in common."""

    total: Array | None
    """The factor of the state (c, n, 1 or d, 1 or e); None for 1."""

    def __init__(self, ops: Arithmetic, x: WrittenChunks) -> None:
        self.ops, self.x = ops, x

    def _written(self) -> tuple[Array, Array]:
        """The two factors (c, n, C, …) whose product the chunks add to the state."""
        raise NotImplementedError

    def _pulled(self, q: Array, d_o: Array) -> tuple[Array, Array]:
        """The two factors (c, n, C, r, …) whose product is added to the state's gradient."""
        raise NotImplementedError

    def states(self, state: Array) -> Array:
        k, v = self._written()
        states = self.ops.empty((k.shape[0] + 1, *state.shape), state)
        states[0, ...] = state
        product_at(self.ops, states, (slice(1, None), ...), transpose(k), v)
        for chunk in range(k.shape[0]):
            kept = self.total if self.total is None else self.total[chunk, ...]
            add_kept_at(self.ops, states, (chunk + 1, ...), states[chunk, ...], kept)
        return states

    def d_states(self, q: Array, d_o: Array, d_state: Array) -> Array:
        q, d_o = self._pulled(q, d_o)
        d_states = pulled(self.ops, q, d_o, d_state)
        for chunk in range(q.shape[0] - 1, -1, -1):
            kept = self.total if self.total is None else self.total[chunk, ...]
            add_kept_at(self.ops, d_states, (chunk, ...), d_states[chunk + 1, ...], kept)
        return d_states


def pulled(ops: Arithmetic, q: Array, d_o: Array, d_state: Array) -> Array:
    """Qᵀ dO before every chunk, and `d_state` after the last: (c + 1, n, d, e)."""
    d_states = ops.empty((q.shape[0] + 1, *d_state.shape), d_state)
    product_at(ops, d_states, (slice(0, -1), ...), transpose(flat(q)), flat(d_o))
    d_states[-1, ...] = d_state
    return d_states


class HeadAdditive(Additive):
    """One decay for the whole state, or none: linear attention, retention, SSD, mLSTM."""

    def __init__(self, ops: Arithmetic, x: WrittenChunks) -> None:
        super().__init__(ops, x)
        self.decay = HeadDecay(ops, x.g, x.k)
        self.total = self.decay.total

    def _written(self) -> tuple[Array, Array]:
        return decayed(self.x.k, self.decay.writing), self.x.v

    def _pulled(self, q: Array, d_o: Array) -> tuple[Array, Array]:
        return decayed(q, self.decay.reading), d_o

    def read(self, q: Array, states: Array) -> Array:
        scores = self.decay.among(self.ops.product(flat(q), transpose(self.x.k)))
        return read(self.ops, self.decay, q, states, scores, self.x.v)

    def vjp(
        self, q: Array, d_o: Array, states: Array, d_states: Array
    ) -> tuple[Array, WrittenChunks]:
        ops, decay, k, v = self.ops, self.decay, self.x.k, self.x.v
        rows, d_rows = flat(q), flat(d_o)
        scores = decay.among(ops.product(rows, transpose(k)))
        d_v = ops.product(decayed(k, decay.writing), d_states[1:, ...])
        d_v = ops.add_product(d_v, transpose(scores), d_rows)

        d_scores = ops.product(d_rows, transpose(v))
        pairs = summed_pairs(ops.multiply(scores, d_scores))
        d_scores = decay.among(d_scores)
        d_q, read = d_of_read(ops, decay, q, d_o, states)
        d_q = ops.add_product(d_q, d_scores, k)
        d_k, written = d_of_written(ops, decay, k, v, d_states)
        d_k = ops.add_product(d_k, transpose(d_scores), rows)
        d_g = decay.d_g(pairs, read, written, kept(decay, states, d_states))
        return namespace(d_q).reshape(d_q, q.shape), WrittenChunks(d_k, d_v, d_g, None)


def read(
    ops: Arithmetic, decay: HeadDecay, q: Array, states: Array, scores: Array, u: Array
) -> Array:
    """reading ∘ Q S + A U."""
    o = _from_states(ops, decay, q, states[:-1, ...])
    o = ops.add_product(flat(o), scores, u)
    return namespace(o).reshape(o, (*q.shape[:-1], o.shape[-1]))


def d_of_read(
    ops: Arithmetic, decay: HeadDecay, q: Array, d_o: Array, states: Array
) -> tuple[Array, Array]:
    """reading ∘ dO Sᵀ (c, n, C r, d), and its products with the queries (c, n, C, 1)."""
    result = _from_states(ops, decay, d_o, transpose(states[:-1, ...]))
    return flat(result), row_sum(summed_rows(result * q))


def _from_states(ops: Arithmetic, decay: HeadDecay, rows: Array, states: Array) -> Array:
    """reading ∘ (rows S), for r rows a token."""
    result = ops.product(flat(rows), states)
    result = namespace(result).reshape(result, (*rows.shape[:-1], result.shape[-1]))
    if decay.reading is None:
        return result
    return ops.multiply(result, decay.reading[..., None, :])


def d_of_written(
    ops: Arithmetic, decay: HeadDecay, k: Array, u: Array, d_states: Array
) -> tuple[Array, Array]:
    """writing ∘ U dSᵀ (c, n, C, d), and its products with the keys (c, n, C, 1)."""
    result = ops.product(u, transpose(d_states[1:, ...]))
    if decay.writing is not None:
        result = ops.multiply(result, decay.writing)
    return result, row_sum(result * k)


def kept(decay: HeadDecay, states: Array, d_states: Array) -> Array:
    """total Σ S ∘ dS (c, n, 1, 1): the gates' gradient from the decay of the state."""
    xp = namespace(states)
    overlap = xp.sum(states[:-1, ...] * d_states[1:, ...], axis=(-2, -1), keepdims=True)
    return overlap if decay.total is None else overlap * decay.total


class KeyAdditive(Additive):
    """One decay for each key channel, a factor of Q and K: GLA, RWKV-6, the second pass of GSA."""

    def __init__(self, ops: Arithmetic, x: WrittenChunks) -> None:
        super().__init__(ops, x)
        self.decay = ChannelDecay(ops, x.g)
        self.total = transpose(self.decay.total)

    def _written(self) -> tuple[Array, Array]:
        return self.x.k * self.decay.writing, self.x.v

    def _pulled(self, q: Array, d_o: Array) -> tuple[Array, Array]:
        return decayed(q, self.decay.reading), d_o

    def read(self, q: Array, states: Array) -> Array:
        o = self.ops.product(flat(decayed(q, self.decay.reading)), states[:-1, ...])
        o = self.ops.add_product(o, self.decay.scores(q, self.x.k), self.x.v)
        return namespace(o).reshape(o, (*q.shape[:-1], o.shape[-1]))

    def vjp(
        self, q: Array, d_o: Array, states: Array, d_states: Array
    ) -> tuple[Array, WrittenChunks]:
        xp, ops, decay, k, v = namespace(q), self.ops, self.decay, self.x.k, self.x.v
        d_rows = flat(d_o)
        d_v = ops.product(k * decay.writing, d_states[1:, ...])
        d_v = ops.add_product(d_v, transpose(decay.scores(q, k)), d_rows)

        d_q, d_k, d_g = decay.gradients(ops.product(d_rows, transpose(v)), q, k)
        read = xp.reshape(ops.product(d_rows, transpose(states[:-1, ...])), q.shape)
        read = ops.multiply(read, decay.reading[..., None, :])
        written = ops.multiply(ops.product(v, transpose(d_states[1:, ...])), decay.writing)
        d_g = ops.add(d_g, sums_from(summed_rows(read * q)))
        d_g = ops.add(d_g, sums_before(written * k))
        overlap = xp.sum(states[:-1, ...] * d_states[1:, ...], axis=-1)[:, :, None, :]
        d_g = ops.add(d_g, overlap * decay.total)
        return ops.add(d_q, read), WrittenChunks(ops.add(d_k, written), d_v, d_g, None)


class ValueAdditive(Additive):
    """One decay for each value channel, a factor of O and V: the first pass of GSA."""

    def __init__(self, ops: Arithmetic, x: WrittenChunks) -> None:
        super().__init__(ops, x)
        self.decay = ChannelDecay(ops, x.g)
        self.total = self.decay.total

    def _written(self) -> tuple[Array, Array]:
        return self.x.k, self.x.v * self.decay.writing

    def _pulled(self, q: Array, d_o: Array) -> tuple[Array, Array]:
        return q, decayed(d_o, self.decay.reading)

    def read(self, q: Array, states: Array) -> Array:
        scores = self.ops.product(flat(q), transpose(self.x.k))
        o = self.decay.read(scores, self.x.v, q.shape[3])
        return self.ops.add(o, self._from_states(q, states))

    def _from_states(self, q: Array, states: Array) -> Array:
        o = self.ops.product(flat(q), states[:-1, ...])
        o = namespace(o).reshape(o, (*q.shape[:-1], o.shape[-1]))
        return self.ops.multiply(o, self.decay.reading[..., None, :])

    def vjp(
        self, q: Array, d_o: Array, states: Array, d_states: Array
    ) -> tuple[Array, WrittenChunks]:
        xp, ops, decay, k, v = namespace(q), self.ops, self.decay, self.x.k, self.x.v
        scores = ops.product(flat(q), transpose(k))
        _, d_v, d_g = decay.gradients(scores, d_o, v)
        d_scores = decay.scores(d_o, v)
        d_q = ops.product(flat(decayed(d_o, decay.reading)), transpose(states[:-1, ...]))
        d_q = ops.add_product(d_q, d_scores, k)
        d_k = ops.product(v * decay.writing, transpose(d_states[1:, ...]))
        d_k = ops.add_product(d_k, transpose(d_scores), flat(q))

        written = ops.multiply(ops.product(k, d_states[1:, ...]), decay.writing)
        d_g = ops.add(d_g, sums_from(summed_rows(self._from_states(q, states) * d_o)))
        d_g = ops.add(d_g, sums_before(written * v))
        overlap = xp.sum(states[:-1, ...] * d_states[1:, ...], axis=-2, keepdims=True)
        d_g = ops.add(d_g, overlap * decay.total)
        return xp.reshape(d_q, q.shape), WrittenChunks(d_k, ops.add(d_v, written), d_g, None)
