"""Biases by distance (ALiBi, tables) for any tile (`precondattn/spec/distance.py`).

The bias of block a with the keys of block j is a Toeplitz matrix of C rows and columns
(`precondattn_portable/distance.py`). Its numbers are 2 C of the array f, which has a number for
each j − i of the call: those from C (j − a + m) on, where block 0 is at most m blocks before that
of a query. f is computed once for each head, and so is the gradient of the slopes or of the table,
from that of f.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from precondattn.arrays import Arrays
from precondattn.spec.distance import added, added_vjp
from precondattn.spec.softmax import SoftmaxAttention
from precondattn_jax.arithmetic import zeros
from precondattn_jax.layout import QueryBlocks
from precondattn_portable.distance import toeplitz, toeplitz_vjp


class ByDistance:
    """The bias of n key heads, from slopes or a table."""

    def __init__(self, leaf: SoftmaxAttention, x: Arrays, blocks: QueryBlocks, n: int) -> None:
        self.leaf, self.x, self.blocks = leaf, x, blocks
        self.before = blocks.keys - 1
        """m"""
        numbers = (2 * blocks.keys - blocks.first) * blocks.size
        self.ahead = jnp.arange(numbers, dtype="int32") + (1 - (self.before + 1) * blocks.size)
        """j − i of each number"""
        f = added(leaf, x, self.ahead)
        self.f = jnp.reshape(f, (n, f.shape[0] // n, numbers))

    def _start(self, a: Array, j: Array) -> Array:
        return (j - a + self.before) * self.blocks.size

    def _numbers(self, f: Array, a: Array, j: Array) -> Array:
        return lax.dynamic_slice_in_dim(f, self._start(a, j), 2 * self.blocks.size, 2)

    def add_to(self, tile: Array, a: Array, j: Array, *, diagonal: bool) -> Array:
        """Scores (b, n, r, C, C) plus the bias of their distances."""
        return tile + toeplitz(self._numbers(self.f, a, j), self.blocks.size)[None]

    def sums(self) -> Array:
        return zeros(self.f.shape, self.f)

    def pulled(self, sums: Array, a: Array, j: Array, d_tile: Array, *, diagonal: bool) -> Array:
        """The sums plus the gradient of f from that of a tile (b, n, r, C, C)."""
        numbers = self._numbers(sums, a, j) + toeplitz_vjp(jnp.sum(d_tile, axis=0))
        return lax.dynamic_update_slice_in_dim(sums, numbers, self._start(a, j), 2)

    def gradient(self, sums: Array) -> Array:
        """The gradient of the slopes or of the table."""
        d_f = jnp.reshape(sums, (-1, sums.shape[2]))
        (gradient,) = added_vjp(self.leaf, self.x, self.ahead, d_f).values()
        return gradient
