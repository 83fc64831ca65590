"""The tiling: heads before time, and blocks of tokens, shared by queries and keys.

Block a has the key positions a C … a C + C − 1. Queries are aligned to the positions of their keys;
where there are fewer queries than keys, zeros are prepended up to the start of a block. A tile is
the scores of a block of queries with a block of keys. Loops iterate over tiles, and only a few
tiles are in memory at a time.

A program that is exported for any number of tokens (`jax.export`) has symbolic sizes, which can not
be compared. Its block size does not depend on them, and the length of its loops is computed when it
runs.
"""

from __future__ import annotations

from typing import Generic

import jax.numpy as jnp
from jax import Array, lax

from precondattn.arrays import Arrays
from precondattn.frame import Frame
from precondattn.spec.array_functions import swap_time_and_heads
from precondattn_portable.algorithm import L

BLOCK = 256
"""Tokens of a block: large products, and little waste above the diagonal."""

FEWEST = 128
"""Tokens of a block if there are many heads, and in packed calls, whose segments may be short."""

REFLECTIONS = 128
"""Tokens of a block of reflections; the cost of its matrices grows with its length."""

TILE = 2**20
"""Approximate number of elements in the tiles of all heads: 4 MiB in float32."""

GROUPED = 2**17
"""Approximate number of elements in the tiles of a group of blocks, which fit a CPU's cache."""


def block_size(tokens: int, heads: int, most: int | None = None, *, packed: bool = False) -> int:
    """Tokens of a block, such that blocks have about equal lengths.

    For a symbolic number of tokens or heads it is `FEWEST`.
    """
    if not is_known(tokens, heads):
        return most or FEWEST
    is_large = heads * BLOCK * BLOCK <= TILE and not packed
    size = most or (BLOCK if is_large else FEWEST)
    count = -(-tokens // size)
    even = -(-tokens // count)
    return min(even + -even % 8, size) if even > 8 else even


def is_known(*sizes: object) -> bool:
    """Whether sizes are numbers, and not symbols."""
    return all(isinstance(size, int) for size in sizes)


heads_first = swap_time_and_heads
"""(b, t, h, …) to (b, h, t, …), and back."""


def padded(x: Array, before: int, after: int, axis: int, value: float = 0) -> Array:
    """x padded with a number before and after."""
    if is_known(before, after) and not before and not after:
        return x
    width = [(0, 0)] * x.ndim
    width[axis] = (before, after)
    return jnp.pad(x, width, constant_values=value)


class QueryBlocks:
    """Blocks of t queries, the last of s tokens."""

    def __init__(self, t: int, s: int, size: int) -> None:
        self.t, self.s, self.size = t, s, size
        self.keys = -(-s // size)
        """Number of blocks of keys."""
        self.first = (s - t) // size
        """The first block with a query; negative where there are more queries than keys."""
        self.count = self.keys - self.first
        """Number of blocks of queries."""
        self.before = (s - t) % size
        self.after = self.keys * size - s

    @property
    def rows(self) -> Array:
        """The blocks of queries."""
        return jnp.arange(self.first, self.keys, dtype="int32")

    def of_keys(self, x: Array, axis: int = 2, value: float = 0) -> Array:
        """(b, n, s, …) padded to whole blocks."""
        return padded(x, 0, self.after, axis, value)

    def of_queries(self, x: Array, axis: int = 3, value: float = 0) -> Array:
        """(b, n, r, t, …) padded to whole blocks."""
        return padded(x, self.before, self.after, axis, value)

    def stacked(self, x: Array, value: float = 0) -> Array:
        """(b, n, r, t, c) as blocks (blocks, b, n, r C, c) of the rows of a key head."""
        b, n, r, _, c = x.shape
        x = jnp.reshape(self.of_queries(x, value=value), (b, n, r, self.count, self.size, c))
        return jnp.reshape(jnp.moveaxis(x, 3, 0), (self.count, b, n, r * self.size, c))

    def unstacked(self, x: Array, r: int) -> Array:
        """(blocks, b, n, r C, c) as (b, t, h, c)."""
        count, b, n, _, c = x.shape
        x = jnp.reshape(x, (count, b, n * r, self.size, c))
        x = jnp.reshape(jnp.transpose(x, (1, 0, 3, 2, 4)), (b, count * self.size, n * r, c))
        return x[:, self.before : self.before + self.t]

    def row(self, stack: Array, a: Array) -> Array:
        """The queries of block a of a stack."""
        return lax.dynamic_index_in_dim(stack, a - self.first, keepdims=False)

    def take(self, x: Array, j: Array, axis: int = 2) -> Array:
        """The tokens of block j of (b, n, s, …)."""
        return lax.dynamic_slice_in_dim(x, j * self.size, self.size, axis)

    def columns(self, j: Array) -> Array:
        """The positions of block j's tokens, as columns of scores (1, 1, 1, C)."""
        return (j * self.size + jnp.arange(self.size, dtype="int32"))[None, None, None]

    def put(self, x: Array, j: Array, tokens: Array, axis: int = 2) -> Array:
        return lax.dynamic_update_slice_in_dim(x, tokens, j * self.size, axis)

    def add(self, x: Array, j: Array, tokens: Array, axis: int = 2) -> Array:
        return self.put(x, j, self.take(x, j, axis) + tokens, axis)


def grouped(x: Array, n: int) -> Array:
    """(b, t, h, c) to (b, n, r, t, c): the r query heads that share one of n key/value heads."""
    b, t, h, c = x.shape
    return jnp.transpose(jnp.reshape(x, (b, t, n, h // n, c)), (0, 2, 3, 1, 4))


def joined(stack: Array) -> Array:
    """(blocks, b, n, C, c) as (b, n, s, c)."""
    count, b, n, size, c = stack.shape
    return jnp.reshape(jnp.moveaxis(stack, 0, 2), (b, n, count * size, c))


class BlockedCall(Generic[L]):
    """A full call of a leaf, in blocks of tokens; arrays have heads before time.

    `queries` is the input whose rows attend, and `most` the most tokens of a block.
    """

    def __init__(
        self, leaf: L, x: Arrays, frame: Frame, *, queries: str = "q", most: int | None = None
    ) -> None:
        self.leaf, self.x, self.frame = leaf, x, frame
        (self.b, t, h, self.d), (_, s, self.n, _) = x[queries].shape, x["k"].shape
        self.r = h // self.n
        size = block_size(s, self.b * h, most, packed=frame.k_segment is not None)
        self.blocks = QueryBlocks(t, s, size)

    def of_keys(self, name: str) -> Array:
        """An input (b, n, s, …), padded to whole blocks."""
        return self.blocks.of_keys(heads_first(self.x[name]))

    def stacked(self, x: Array, value: float = 0) -> Array:
        """(b, t, h, c) as blocks (blocks, b, n, r C, c)."""
        return self.blocks.stacked(grouped(x, self.n), value)

    def tokens(self, x: Array) -> Array:
        """(b, n, s, …) without padding, as (b, s, n, …)."""
        return heads_first(x[:, :, : self.blocks.s])
