"""The decay between the tokens of a chunk, with one decay for each channel.

The pairs of a chunk are partitioned into squares in which the decay factors, as in
`precondattn_portable.channel_decay`; here nothing is written in place, and JAX differentiates them.
"""

from __future__ import annotations

from functools import cached_property

import jax
import jax.numpy as jnp
from jax import Array

from precondattn_jax.arithmetic import product_with_transposed
from precondattn_portable import channel_decay
from precondattn_portable.channel_decay import FIRST, SECOND, HalvedDecay


class ChannelDecay(channel_decay.ChannelDecay):
    """Decays of gates (c, n, C, w), C a power of two."""

    @cached_property
    def halvings(self) -> list[HalvedDecay]:
        result = []
        since, until = self.g, jnp.zeros_like(self.g)
        half = 1
        while half < self.size:
            shape = self._blocks(self.g, half)
            since, until = jnp.reshape(since, shape), jnp.reshape(until, shape)
            first, second = until[FIRST], since[SECOND]
            result.append(HalvedDecay(half, jnp.exp(second), jnp.exp(first)))
            total_of_first, total_of_second = since[FIRST][..., -1:, :], second[..., -1:, :]
            until = jnp.stack([first + total_of_second, until[SECOND]], axis=3)
            since = jnp.stack([since[FIRST], second + total_of_first], axis=3)
            half *= 2
        return result

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
        rows = jnp.repeat(y[:, :, :, None], r, axis=3)  # The scores are linear in them.
        return jax.vjp(lambda x: self.scores(x, y), rows)[1](a)[0]

    def gradients(self, a: Array, x: Array, y: Array) -> tuple[Array, Array, Array]:
        def scores(x: Array, y: Array, g: Array) -> Array:
            return ChannelDecay(self.ops, g, y).scores(x, y)

        _, pull = jax.vjp(scores, x, y, self.g)
        d_x, d_y, d_g = pull(a)
        return d_x, d_y, d_g
