"""The decay between the tokens of a chunk, with one decay for each channel.

The pairs of a chunk are partitioned into squares in which the decay factors, as in
`precondattn_portable.channel_decay`; here nothing is written in place.
"""

from __future__ import annotations

from functools import cached_property

import jax.numpy as jnp
from jax import Array

from precondattn_jax.arithmetic import product, product_with_transposed, transposed_product
from precondattn_portable import channel_decay
from precondattn_portable.channel_decay import FIRST, SECOND, HalvedDecay
from precondattn_portable.head_decay import sums_before, sums_from


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
            until = _halves(first + total_of_second, until[SECOND])
            since = _halves(since[FIRST], second + total_of_first)
            half *= 2
        return result

    def scores(self, x: Array, y: Array, *, diagonal: bool = True) -> Array:
        chunks, heads, size, r, _ = x.shape
        whole = jnp.sum(x * y[..., None, :], axis=-1, keepdims=True)
        if not diagonal:
            whole = jnp.zeros_like(whole)
        for half, since, until in self.halvings:
            corner = product_with_transposed(
                self._second(x, half, since), self._first(y, half, until)
            )
            whole = jnp.reshape(whole, (chunks, heads, size // (2 * half), 2, half * r, half))
            upper = jnp.concatenate([whole[FIRST], jnp.zeros_like(corner)], axis=-1)
            lower = jnp.concatenate([corner, whole[SECOND]], axis=-1)
            whole = jnp.concatenate([upper, lower], axis=-2)
        return jnp.reshape(whole, (chunks, heads, size * r, size))

    def read(self, a: Array, y: Array, r: int) -> Array:
        corners, diagonal = self._corners(a, r)
        o = diagonal * y[..., None, :]
        for (half, since, until), corner in zip(self.halvings, corners, strict=True):
            result = product(corner, self._first(y, half, until))
            o = jnp.reshape(o, (*self._blocks(y, half)[:-1], r, y.shape[-1]))
            second = o[SECOND]
            second = second + jnp.reshape(result, second.shape) * since[..., None, :]
            o = _halves(o[FIRST], second)
        return jnp.reshape(o, (*y.shape[:3], r, y.shape[-1]))

    def gradients(self, a: Array, x: Array, y: Array) -> tuple[Array, Array, Array]:
        r, width = x.shape[3], x.shape[4]
        corners, diagonal = self._corners(a, r)
        d_x, d_y = diagonal * y[..., None, :], jnp.sum(diagonal * x, axis=3)
        d_g = jnp.zeros_like(y)
        for (half, since, until), corner in zip(self.halvings, corners, strict=True):
            shape = self._blocks(y, half)
            d_x = jnp.reshape(d_x, (*shape[:-1], r, width))
            d_y, d_g = jnp.reshape(d_y, shape), jnp.reshape(d_g, shape)
            later, earlier = self._second(x, half, since), self._first(y, half, until)

            read = jnp.reshape(product(corner, earlier), d_x[SECOND].shape)
            crossing = jnp.sum(read * jnp.reshape(later, read.shape), axis=-2)
            d_x = _halves(d_x[FIRST], d_x[SECOND] + read * since[..., None, :])
            written = transposed_product(corner, later)
            d_g = _halves(
                d_g[FIRST] + sums_before(written * earlier), d_g[SECOND] + sums_from(crossing)
            )
            d_y = _halves(d_y[FIRST] + written * until, d_y[SECOND])
        return jnp.reshape(d_x, x.shape), jnp.reshape(d_y, y.shape), jnp.reshape(d_g, y.shape)

    def _corners(self, a: Array, r: int) -> tuple[list[Array], Array]:
        chunks, heads = a.shape[:2]
        whole = jnp.reshape(a, (chunks, heads, 1, self.size * r, self.size))
        corners = []
        for half, _, _ in reversed(self.halvings):
            corners.append(whole[..., half * r :, :half])
            blocks = whole.shape[2]
            narrower = _halves(whole[..., : half * r, :half], whole[..., half * r :, half:])
            whole = jnp.reshape(narrower, (chunks, heads, 2 * blocks, half * r, half))
        return corners[::-1], jnp.reshape(whole, (chunks, heads, self.size, r, 1))


def _halves(first: Array, second: Array) -> Array:
    """Blocks (c, n, blocks, 2, …) from their halves."""
    return jnp.stack([first, second], axis=3)
