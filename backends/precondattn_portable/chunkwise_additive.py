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
from precondattn.spec.array_functions import transpose
from precondattn_portable.arithmetic import Arithmetic, product_at, stored
from precondattn_portable.channel_decay import ChannelDecay
from precondattn_portable.head_decay import HeadDecay, decayed, flat, summed_rows


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


BY_DECAY = {
    (-2, -1): ((1, 0, 2, 3), (1, 0, 2, 3)),
    -1: ((1, 2, 0, 3), (2, 0, 1, 3)),
    -2: ((1, 3, 0, 2), (2, 0, 3, 1)),
}
"""The order of the axes of states (c, n, d, e) in which c follows the axes that have decays of
their own, by the axes that share one; and the order back."""

Gradients = tuple[Array, WrittenChunks]
"""The gradients of the queries, and of the written inputs."""


class ChunkGroup:
    """Chunks that are computed at once, except for the states between them."""

    kind: type[HeadDecay | ChannelDecay] = HeadDecay
    shared: int | tuple[int, int] = (-2, -1)
    """The axes of the state along which it has one decay."""

    def __init__(
        self, ops: Arithmetic, x: WrittenChunks, decay: HeadDecay | ChannelDecay | None = None
    ) -> None:
        self.ops, self.x = ops, x
        self.decay = self.kind(ops, x.g, x.k) if decay is None else decay
        total = self.decay.total
        self.total = transpose(total) if self.shared == -1 else total
        """The factor of the state (c, n, 1 or d, 1 or e); None for 1."""
        self.u = x.v
        """U, the rows that are written to the state with the keys (c, n, C, e)."""

    def states(self, state: Array) -> Array:
        """The states before every chunk and after the last: (c + 1, n, d, e)."""
        raise NotImplementedError

    def read(self, q: Array, states: Array) -> Array:
        """The outputs (c, n, C, r, e) of queries (c, n, C, r, d); call `states` first."""
        o = flat(self.decay.of_states(q, states[:-1, ...]))
        o = self.ops.add_product(o, self.decay.scores(q, self.x.k), self.u)
        return namespace(o).reshape(o, (*q.shape[:-1], o.shape[-1]))

    def d_states(self, q: Array, d_o: Array, d_state: Array) -> Array:
        """The gradients of the states (c + 1, n, d, e)."""
        raise NotImplementedError

    def vjp(self, q: Array, d_o: Array, states: Array, d_states: Array) -> Gradients:
        """The gradients of the queries and of the written inputs; call `d_states` first."""
        raise NotImplementedError

    def _pass_on(self, states: Array, chunk: int, before: int, after: int) -> None:
        """Add one of the states, decayed over a chunk, to another."""
        state, view = states[before, ...], states[after, ...]
        if self.total is None:
            result = self.ops.add(view, state)
        else:
            result = self.ops.add_multiple(view, state, self.total[chunk, ...])
        stored(states, (after, ...), view, result)

    def _added_by_reads(self, q: Array, d_o: Array, d_state: Array) -> Array:
        """Qᵀ dO before every chunk, and `d_state` after the last: (c + 1, n, d, e)."""
        d_states = self.ops.empty((q.shape[0] + 1, *d_state.shape), d_state)
        product_at(self.ops, d_states, (slice(0, -1), ...), transpose(flat(q)), flat(d_o))
        d_states[-1, ...] = d_state
        return d_states

    def _kept(self, states: Array, d_states: Array) -> Array:
        """total Σ S ∘ dS (c, n, 1, w): the gates' gradient from the decay of the state."""
        xp = namespace(states)
        overlap = xp.sum(states[:-1, ...] * d_states[1:, ...], axis=self.shared, keepdims=True)
        overlap = overlap if self.total is None else overlap * self.total
        return xp.reshape(overlap, (*overlap.shape[:2], 1, -1))


class Additive(ChunkGroup):
    """The parts of an additive recurrence that do not depend on the kind of decay."""

    def _written(self) -> tuple[Array, Array]:
        """The two factors (c, n, C, …) whose product the chunks add to the state."""
        return decayed(self.x.k, self.decay.writing), self.x.v

    def _pulled(self, q: Array, d_o: Array) -> tuple[Array, Array]:
        """The two factors (c, n, C, r, …) whose product is added to the state's gradient."""
        return decayed(q, self.decay.reading), d_o

    def _accumulated(self, states: Array, *, transposed: bool = False) -> Array:
        """E S over all states (c + 1, n, d, e), in S, where E is the decay between them; or Eᵀ S.

        It is as many small products as there are decays, in the place of a product per chunk.
        """
        decay, xp = self.decay.among_states, namespace(states)
        if transposed:
            decay = transpose(decay)
        order, back = BY_DECAY[self.shared]
        each = xp.permute_dims(states, order)
        rows = xp.reshape(each, (decay.shape[0], states.shape[0], -1))
        states[...] = xp.permute_dims(xp.reshape(self.ops.product(decay, rows), each.shape), back)
        return states

    def states(self, state: Array) -> Array:
        k, v = self._written()
        states = self.ops.empty((k.shape[0] + 1, *state.shape), state)
        states[0, ...] = state
        product_at(self.ops, states, (slice(1, None), ...), transpose(k), v)
        if self.ops.sizes.few_operations:
            return self._accumulated(states)
        for chunk in range(k.shape[0]):
            self._pass_on(states, chunk, chunk, chunk + 1)
        return states

    def d_states(self, q: Array, d_o: Array, d_state: Array) -> Array:
        d_states = self._added_by_reads(*self._pulled(q, d_o), d_state)
        if self.ops.sizes.few_operations:
            return self._accumulated(d_states, transposed=True)
        for chunk in range(q.shape[0] - 1, -1, -1):
            self._pass_on(d_states, chunk, chunk + 1, chunk)
        return d_states

    def vjp(self, q: Array, d_o: Array, states: Array, d_states: Array) -> Gradients:
        ops, decay, k, v = self.ops, self.decay, self.x.k, self.x.v
        scores, d_rows = decay.scores(q, k), flat(d_o)
        d_v = ops.product(self._written()[0], d_states[1:, ...])
        d_v = ops.add_product(d_v, transpose(scores), d_rows)
        d_scores = ops.product(d_rows, transpose(v))
        d_q = decay.times_reading(d_o, transpose(states[:-1, ...]))
        d_k = decay.times_writing(v, transpose(d_states[1:, ...]))
        read, written = decay.by_gate(summed_rows(d_q * q)), decay.by_gate(d_k * k)
        d_q, d_k, within = decay.pull(scores, d_scores, q, k, d_q, d_k)
        d_g = decay.d_g(within, read, written, self._kept(states, d_states))
        return d_q, WrittenChunks(d_k, d_v, d_g, None)


class HeadAdditive(Additive):
    """One decay for the whole state, or none: linear attention, retention, SSD, mLSTM."""


class KeyAdditive(Additive):
    """One decay for each key channel, a factor of Q and K: GLA, RWKV-6, the second pass of GSA."""

    kind = ChannelDecay
    shared = -1


class ValueAdditive(Additive):
    """One decay for each value channel, a factor of O and V: the first pass of GSA."""

    kind = ChannelDecay
    shared = -2
    decay: ChannelDecay

    def _written(self) -> tuple[Array, Array]:
        return self.x.k, self.x.v * self.decay.writing

    def _pulled(self, q: Array, d_o: Array) -> tuple[Array, Array]:
        return q, decayed(d_o, self.decay.reading)

    def read(self, q: Array, states: Array) -> Array:
        scores = self.ops.product(flat(q), transpose(self.x.k))
        o = self.decay.read(scores, self.x.v, q.shape[3])
        return self.ops.add(o, self.decay.times_reading(q, states[:-1, ...]))

    def vjp(self, q: Array, d_o: Array, states: Array, d_states: Array) -> Gradients:
        ops, decay, k, v = self.ops, self.decay, self.x.k, self.x.v
        scores, d_scores = ops.product(flat(q), transpose(k)), decay.scores(d_o, v)
        d_q = ops.product(flat(self._pulled(q, d_o)[1]), transpose(states[:-1, ...]))
        d_q = ops.add_product(d_q, d_scores, k)
        d_k = ops.product(self._written()[1], transpose(d_states[1:, ...]))
        d_k = ops.add_product(d_k, transpose(d_scores), flat(q))

        _, d_v, within = decay.gradients(scores, d_o, v)
        read = summed_rows(decay.times_reading(q, states[:-1, ...]) * d_o)
        written = decay.times_writing(k, d_states[1:, ...])
        d_g = decay.d_g(within, read, written * v, self._kept(states, d_states))
        d_q = namespace(q).reshape(d_q, q.shape)
        return d_q, WrittenChunks(d_k, ops.add(d_v, written), d_g, None)
