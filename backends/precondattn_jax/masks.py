"""Attention masks of tiles, and the range of tiles that are not fully masked.

With causality, block a attends to the preceding blocks and to the lower triangle of its own block.
A window excludes the first of these blocks, and so do segments: no query of block a attends to keys
before the segment of its first query. Loops have these bounds also where segments are traced.
Validity masks individual keys. With a prefix, block a also attends to the blocks of the prefix,
which may come after it; an attn_mask excludes blocks before and after all pairs that it leaves.
"""

from __future__ import annotations

from functools import reduce
from math import inf
from operator import and_

import jax.numpy as jnp
from jax import Array, lax

from precondattn.frame import Frame
from precondattn_jax.layout import QueryBlocks, is_known
from precondattn_portable.layout import grouped_bias


def spans(segment: Array) -> tuple[Array, Array]:
    """The first and the last token of each token's segment (s,), the extremes of all sequences."""
    s = segment.shape[1]
    position = jnp.arange(s, dtype="int32")
    is_new = segment[:, 1:] != segment[:, :-1]
    edge = jnp.ones_like(segment[:, :1], dtype=bool)
    begins = jnp.concatenate([edge, is_new], axis=1)
    ends = jnp.concatenate([is_new, edge], axis=1)
    start = lax.cummax(jnp.where(begins, position, 0), axis=1)
    last = lax.cummin(jnp.where(ends, position, s - 1), axis=1, reverse=True)
    return jnp.min(start, axis=0), jnp.max(last, axis=0)


class Mask:
    """The mask of a full call. `strict`: a token does not attend to itself."""

    def __init__(
        self,
        frame: Frame,
        blocks: QueryBlocks,
        *,
        causal: bool = True,
        window: int | None = None,
        strict: bool = False,
        of_queries: bool = False,
        heads: int = 1,
    ) -> None:
        self.blocks, self.causal, self.window, self.strict = blocks, causal, window, strict
        self.q_valid = self.k_valid = self.q_segment = self.k_segment = None
        if frame.q_valid is not None and of_queries:
            self.q_valid = blocks.of_queries(frame.q_valid, axis=1)
        if frame.k_valid is not None:
            self.k_valid = blocks.of_keys(frame.k_valid, axis=1)
        if frame.k_segment is not None:
            self.q_segment = blocks.of_queries(frame.q_segment, axis=1)
            self.k_segment = blocks.of_keys(frame.k_segment, axis=1)
            self.start, self.last = spans(frame.k_segment)
        self.q_prefix = self.pairs = None
        if frame.q_prefix is not None:
            self.q_prefix = blocks.of_queries(frame.q_prefix, axis=1)
            ends = jnp.reshape(self.q_prefix, (-1, blocks.count, blocks.size)).max((0, 2))
            self.reach = jnp.minimum(-(-ends // blocks.size), blocks.keys)
        if frame.pairs is not None:
            pairs = grouped_bias(frame.pairs, heads)
            self.pairs = blocks.of_keys(blocks.of_queries(pairs, value=False), 4, value=False)
            self.low, self.high = self._marked()

    @property
    def has_diagonal(self) -> bool:
        """Whether no query attends to later keys; the tile of its own block is then separate."""
        return self.causal and self.q_prefix is None

    def _marked(self) -> tuple[Array, Array]:
        """The first block of keys that an attn_mask leaves to each block of queries, and the last
        plus one."""
        blocks, whole = self.blocks, jnp.any(self.pairs, axis=(0, 1, 2))
        tiles = jnp.reshape(whole, (blocks.count, blocks.size, blocks.keys, blocks.size))
        seen = jnp.any(tiles, axis=(1, 3))
        block = jnp.arange(blocks.keys, dtype="int32")
        low = jnp.min(jnp.where(seen, block, blocks.keys), axis=1)
        return low, jnp.max(jnp.where(seen, block + 1, 0), axis=1)

    def ranges(self, a: Array) -> list[tuple[Array, Array]]:
        """The ranges (begin, end) of blocks of keys for block a, without a separate diagonal."""
        first, stop = self.first(a), a if self.has_diagonal else self.stop(a)
        ranges = [(first, stop)]
        if self.q_prefix is not None:
            own_stop, reach = a + 1 if self.causal else stop, self.reach[a - self.blocks.first]
            ranges = [(first, jnp.maximum(own_stop, reach))]
            if self.window is not None:
                begin = self._start_of_segment(a, jnp.zeros_like(a))
                ranges.append((begin, jnp.minimum(reach, first)))
        if self.pairs is not None:
            row = a - self.blocks.first
            low, high = self.low[row], self.high[row]
            ranges = [(jnp.maximum(i, low), jnp.minimum(j, high)) for i, j in ranges]
        return [(i, jnp.maximum(i, j)) for i, j in ranges]

    def first(self, a: Array) -> Array:
        """The first block of keys that block a attends to."""
        size, first = self.blocks.size, jnp.zeros_like(a)
        if self.window is not None:
            first = jnp.clip((a * size - self.window + 1) // size, 0, self.blocks.keys)
        return self._start_of_segment(a, first)

    def _start_of_segment(self, a: Array, first: Array) -> Array:
        """The block in which the segment of a's first query begins, or `first` if that is later."""
        if self.k_segment is None:
            return first
        query = jnp.maximum(a * self.blocks.size, self.blocks.s - self.blocks.t)
        return jnp.maximum(first, self.start[query] // self.blocks.size)

    def stop(self, a: Array) -> Array:
        """The last block of keys that block a attends to, plus one, without causality."""
        size, stop = self.blocks.size, jnp.full_like(a, self.blocks.keys)
        if self.window is not None:
            stop = jnp.clip(((a + 1) * size + self.window - 2) // size + 1, 0, stop)
        if self.k_segment is not None:
            query = jnp.minimum((a + 1) * size, self.blocks.s) - 1
            stop = jnp.minimum(stop, self.last[query] // size + 1)
        return stop

    def visible(self, a: Array, j: Array, *, diagonal: bool = False) -> Array | None:
        """(b or 1, n or 1, r or 1, C, C), or None where all pairs are visible.

        `diagonal` declares a = j.
        """
        blocks, size = self.blocks, self.blocks.size
        token = jnp.arange(size, dtype="int32")
        distance = (a - j) * size + token[:, None] - token[None, :]
        conditions: list[Array] = []
        if self.causal and (diagonal or not self.has_diagonal):
            conditions.append((distance > 0 if self.strict else distance >= 0)[None])
        if self.window is not None:
            conditions.append((jnp.abs(distance) < self.window)[None])
        if self.q_prefix is not None and conditions:
            end = blocks.take(self.q_prefix, a - blocks.first, 1)
            of_prefix = (j * size + token)[None, None, :] < end[:, :, None]
            conditions = [reduce(and_, conditions) | of_prefix]
        if not self.has_diagonal and not (is_known(blocks.after) and blocks.after == 0):
            conditions.append((j * size + token < blocks.s)[None, None, :])
        if self.k_valid is not None:
            conditions.append(blocks.take(self.k_valid, j, 1)[:, None, :])
        if self.q_valid is not None:
            conditions.append(blocks.take(self.q_valid, a - blocks.first, 1)[:, :, None])
        if self.k_segment is not None:
            rows = blocks.take(self.q_segment, a - blocks.first, 1)
            conditions.append(rows[:, :, None] == blocks.take(self.k_segment, j, 1)[:, None, :])
        whole = [reduce(and_, conditions)[:, None, None]] if conditions else []
        if self.pairs is not None:
            rows = blocks.take(self.pairs, a - blocks.first, 3)
            whole.append(blocks.take(rows, j, 4))
        return reduce(and_, whole) if whole else None

    def apply(
        self, tile: Array, a: Array, j: Array, *, diagonal: bool = False, otherwise: float = -inf
    ) -> Array:
        """Scores (b, n, r C, C), set to `otherwise` at masked pairs."""
        visible = self.visible(a, j, diagonal=diagonal)
        if visible is None:
            return tile
        b, n, _, columns = tile.shape
        pairs = jnp.reshape(tile, (b, n, -1, self.blocks.size, columns))
        return jnp.reshape(jnp.where(visible, pairs, otherwise), tile.shape)
