"""The states between chunks, for groups of chunks: reads, writes and their gradients.

    additive:    S ← total ∘ S + (writing ∘ K)ᵀ V
    delta rule:  U = M (β ∘ (V − reading ∘ E S)),    S ← total ∘ S + (writing ∘ K)ᵀ U

The other parts and their equations are in `precondattn_portable.chunkwise_additive` and `…_delta`.
Only what depends on the adjacent chunk is in the loop.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from precondattn.arrays import Tree
from precondattn.spec.recurrence import Stream
from precondattn_jax.arithmetic import JAX, product, product_with_transposed, transposed_product
from precondattn_jax.triangular_inverse import unit_lower_inverse
from precondattn_portable import channel_decay, chunkwise, chunkwise_additive, chunkwise_delta
from precondattn_portable.channel_decay import FIRST, SECOND
from precondattn_portable.chunkwise_additive import ChunkGroup, WrittenChunks
from precondattn_portable.head_decay import decayed, flat


class StatesOfSums(chunkwise_additive.Additive):
    """The states of the variants of `Additive`."""

    def states(self, state: Array) -> Array:
        last, before = _sums(state, transposed_product(*self._written()), self.total)
        return jnp.concatenate([before, last[None]])

    def d_states(self, q: Array, d_o: Array, d_state: Array) -> Array:
        rows, d_rows = self._pulled(q, d_o)
        added = transposed_product(flat(rows), flat(d_rows))
        first, after = _sums(d_state, added, self.total, reverse=True)
        return jnp.concatenate([first[None], after])


def _sums(
    state: Array, added: Array, total: Array | None, *, reverse: bool = False
) -> tuple[Array, Array]:
    """The last state, and the one before every step S ← total ∘ S + added."""

    def step(state: Array, x: Tree) -> tuple[Array, Array]:
        added, total = x
        return (state if total is None else total * state) + added, state

    last, before = lax.scan(step, state, (added, total), reverse=reverse)
    return last, before


class HeadAdditive(StatesOfSums, chunkwise_additive.HeadAdditive):
    """One decay for the whole state."""


class ChannelDecay(channel_decay.ChannelDecay):
    """Decays of gates (c, n, C, w), C a power of two, between the tokens of a chunk.

    The pairs of a chunk are partitioned into squares in which the decay factors. Here nothing is
    written in place, and JAX differentiates them.
    """

    def _with_totals(self, since: Array, until: Array) -> tuple[Array, Array]:
        of_first, of_second = since[FIRST][..., -1:, :], since[SECOND][..., -1:, :]
        until = jnp.stack([until[FIRST] + of_second, until[SECOND]], axis=3)
        return jnp.stack([since[FIRST], since[SECOND] + of_first], axis=3), until

    def scores(self, x: Array, y: Array, *, diagonal: bool = True) -> Array:
        chunks, heads, size, r, _ = x.shape
        whole = jnp.sum(x * y[..., None, :], axis=-1, keepdims=True)
        if not diagonal:
            whole = jnp.zeros_like(whole)
        for half, since, until in self.halvings:
            later, earlier = self._second(x, half, since), self._first(y, half, until)
            corner = product_with_transposed(later, earlier)
            whole = jnp.reshape(whole, (chunks, heads, size // (2 * half), 2, half * r, half))
            upper = jnp.concatenate([whole[FIRST], jnp.zeros_like(corner)], axis=-1)
            lower = jnp.concatenate([corner, whole[SECOND]], axis=-1)
            whole = jnp.concatenate([upper, lower], axis=-2)
        return jnp.reshape(whole, (chunks, heads, size * r, size))

    def read(self, a: Array, y: Array, r: int) -> Array:
        rows = jnp.repeat(y[:, :, :, None], r, axis=3)  # Any rows: scores are linear in them.
        return jax.vjp(lambda x: self.scores(x, y), rows)[1](a)[0]

    def gradients(self, a: Array, x: Array, y: Array) -> tuple[Array, Array, Array]:
        def scores(x: Array, y: Array, g: Array) -> Array:
            return ChannelDecay(self.ops, g, y).scores(x, y)

        _, pull = jax.vjp(scores, x, y, self.g)
        d_x, d_y, d_g = pull(a)
        return d_x, d_y, d_g


class KeyAdditive(StatesOfSums, chunkwise_additive.KeyAdditive):
    """One decay for each key channel."""

    kind = ChannelDecay


class ValueAdditive(StatesOfSums, chunkwise_additive.ValueAdditive):
    """One decay for each value channel."""

    kind = ChannelDecay


class DeltaRule(chunkwise_delta.DeltaRule):
    """The delta rule, with one decay for the whole state."""

    def _inverted(self, strict: Array) -> Array:
        return unit_lower_inverse(strict)

    def states(self, state: Array) -> Array:
        def step(state: Array, x: Tree) -> tuple[Array, tuple[Array, Array]]:
            right, reading_k, inverse, writing_k, total = x
            u = product(inverse, right - product(reading_k, state))
            kept = state if total is None else total * state
            return kept + transposed_product(writing_k, u), (state, u)

        right = self.x.v * self.x.beta
        chunks = (right, self.reading_k, self.inverse, self.writing_k, self.total)
        last, (before, self.u) = lax.scan(step, state, chunks)
        return jnp.concatenate([before, last[None]])

    def d_states(self, q: Array, d_o: Array, d_state: Array) -> Array:
        self.scores = self.decay.scores(q, self.x.k)
        d_u = transposed_product(self.scores, flat(d_o))
        pulled = transposed_product(flat(decayed(q, self.decay.reading)), flat(d_o))

        def step(d_state: Array, x: Tree) -> tuple[Array, tuple[Array, Array]]:
            d_u, pulled, writing_k, inverse, reading_k, total = x
            right = transposed_product(inverse, d_u + product(writing_k, d_state))
            kept = d_state if total is None else total * d_state
            return kept + pulled - transposed_product(reading_k, right), (d_state, right)

        chunks = (d_u, pulled, self.writing_k, self.inverse, self.reading_k, self.total)
        first, (after, self.d_right) = lax.scan(step, d_state, chunks, reverse=True)
        return jnp.concatenate([first[None], after])


class KeyDeltaRule(DeltaRule, chunkwise_delta.KeyDeltaRule):
    """The delta rule, with one decay for each key channel."""

    kind = ChannelDecay


KINDS: dict[chunkwise.GroupKind, chunkwise.GroupKind] = {
    chunkwise_additive.HeadAdditive: HeadAdditive,
    chunkwise_additive.KeyAdditive: KeyAdditive,
    chunkwise_additive.ValueAdditive: ValueAdditive,
    chunkwise_delta.DeltaRule: DeltaRule,
    chunkwise_delta.KeyDeltaRule: KeyDeltaRule,
}


def group_of(x: Stream, chunks: WrittenChunks) -> ChunkGroup:
    """The computation for some chunks of a stream."""
    return KINDS[chunkwise.kind_of(x)](JAX, chunks)
