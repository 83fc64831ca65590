"""Softmax attention on packed sequences: several blocks of queries at once.

A block of queries in a short segment has one or two tiles, which are too few for a loop of its own.
So G neighbouring blocks a … a + G − 1 form a group, and its tiles with the blocks of keys at a
distance of o blocks,

    S = (S_{a, a+o}, S_{a+1, a+1+o}, …, S_{a+G−1, a+G−1+o}),

are one product, of G times as many sequences. These keys are G neighbouring blocks too. The group's
loop over the distances o ends when none of its blocks attends to more keys; pairs outside a
segment are masked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from precondattn.arrays import Arrays, Tree
from precondattn.frame import Frame
from precondattn.spec.metric import DOT
from precondattn.spec.softmax import SoftmaxAttention, capped, slope
from precondattn_jax import layout
from precondattn_jax.arithmetic import product, product_with_transposed, transposed_product, zeros
from precondattn_jax.dot_scores import Sums
from precondattn_jax.loops import PLAIN, Loops
from precondattn_jax.read_mean import ReadRows
from precondattn_jax.tiled_attention import Reads, TiledAttention


def has_groups(leaf: SoftmaxAttention, frame: Frame) -> bool:
    """Whether a call is one of packed sequences with scores that depend on q and k alone."""
    depends_on_more = leaf.metric != DOT or leaf.forget != "none" or leaf.bias or frame.masks_pairs
    is_plain = not depends_on_more and leaf.distance == "none"
    return frame.k_segment is not None and is_plain


class BlockGroup(NamedTuple):
    """The arrays of a group of blocks, or, with one more axis in front, of all groups."""

    first: Array
    """a, the first of its blocks"""
    behind: Array
    """The largest distance o, over its blocks, of a block of keys before that is attended to"""
    ahead: Array
    """The largest distance o of a block of keys after"""
    run: Array
    """The segment (G b, C) of each query, by its number in the sequence."""
    q: Array
    """(G b, n, r C, d)"""


class GroupedAttention(TiledAttention):
    """A packed call of `Softmax`."""

    def __init__(
        self, leaf: SoftmaxAttention, x: Arrays, frame: Frame, loops: Loops = PLAIN
    ) -> None:
        super().__init__(leaf, x, frame, loops)
        blocks = self.blocks
        tile = self.b * self.n * self.r * blocks.size**2
        self.groups = -(-blocks.count // max(1, layout.GROUPED // tile))
        """Number of groups."""
        self.size = -(-blocks.count // self.groups)
        """G"""
        self.front = self.size - 1 - min(blocks.first, 0)
        self.back = self.groups * self.size - blocks.count + self.size - 1
        self.k = self._keys(self.scores.k)
        segment: Array = frame.k_segment
        is_new = segment[:, 1:] != segment[:, :-1]
        is_new = layout.padded(is_new.astype(jnp.int32), 1, 0, 1)
        numbers = jnp.cumsum(is_new, axis=1, dtype=jnp.int32)
        self.run = self._runs(numbers)
        self.each = self._groups(numbers)

    # ------------------------------------------------------------------------------- layout

    def _rows(self, stack: Array, value: float = 0) -> Array:
        """(blocks, b, …) as (groups, G b, …)."""
        whole = layout.padded(stack, 0, self.groups * self.size - stack.shape[0], 0, value)
        return jnp.reshape(whole, (self.groups, self.size * stack.shape[1], *stack.shape[2:]))

    def _keys(self, x: Array) -> Array:
        """(b, n, s, c) as blocks (blocks, b, n, C, c), with further ones before and after."""
        b, n, _, c = x.shape
        each = jnp.reshape(x, (b, n, self.blocks.keys, self.blocks.size, c))
        return layout.padded(jnp.moveaxis(each, 2, 0), self.front, self.back, 0)

    def _tokens(self, stack: Array) -> Array:
        """Blocks of keys as (b, n, s, c)."""
        return layout.joined(stack[self.front : self.front + self.blocks.keys])

    def _at(self, stack: Array, j: Array) -> Array:
        """Blocks j … j + G − 1 as (G b, …)."""
        part = lax.dynamic_slice_in_dim(stack, j + self.front, self.size)
        return jnp.reshape(part, (-1, *part.shape[2:]))

    def _added(self, stack: Array, j: Array, part: Array) -> Array:
        total = self._at(stack, j) + part
        total = jnp.reshape(total, (self.size, *stack.shape[1:]))
        return lax.dynamic_update_slice_in_dim(stack, total, j + self.front, 0)

    def _runs(self, numbers: Array) -> Array:
        """The numbers of the keys' segments as blocks (blocks, b, C); −1: a masked key."""
        if self.frame.k_valid is not None:
            numbers = jnp.where(self.frame.k_valid, numbers, -1)
        each = self.blocks.of_keys(numbers, axis=1, value=-1)
        each = jnp.reshape(each, (self.b, self.blocks.keys, self.blocks.size))
        return layout.padded(jnp.moveaxis(each, 1, 0), self.front, self.back, 0, -1)

    def _groups(self, numbers: Array) -> BlockGroup:
        """All groups."""
        blocks, mask = self.blocks, self.mask
        run = blocks.of_queries(numbers[:, blocks.s - blocks.t :], axis=1, value=-2)
        run = jnp.moveaxis(jnp.reshape(run, (self.b, blocks.count, blocks.size)), 1, 0)

        def most(distance: Array) -> Array:
            return jnp.max(self._rows(distance[:, None]), axis=1)

        a = blocks.rows
        return BlockGroup(
            blocks.first + jnp.arange(self.groups, dtype="int32") * self.size,
            most(a - mask.first(a)),
            most(mask.stop(a) - 1 - a),
            self._rows(run, -2),
            self._rows(self.scores.q),
        )

    # -------------------------------------------------------------------------------- tiles

    def _tile(self, group: BlockGroup, o: Array | int, k: Array) -> Array:
        """S at distance o, −∞ at masked pairs (G b, n, r C, C)."""
        tile = product_with_transposed(group.q, k)
        if self.leaf.softcap is not None:
            tile = capped(tile, self.leaf.softcap)
        size = self.blocks.size
        visible = group.run[:, :, None] == self._at(self.run, group.first + o)[:, None, :]
        token = jnp.arange(size, dtype="int32")
        distance = token[:, None] - token[None, :] - o * size
        if self.leaf.causal and isinstance(o, int):  # It is 0; in loops o is traced and below 0.
            visible &= (distance >= 0)[None]
        if self.leaf.window is not None:
            visible &= (jnp.abs(distance) < self.leaf.window)[None]
        pairs = jnp.reshape(tile, (*tile.shape[:2], self.r, size, size))
        return jnp.reshape(jnp.where(visible[:, None, None], pairs, -math.inf), tile.shape)

    def _at_each_distance(self, group: BlockGroup, step: Callable[..., Tree], state: Tree) -> Tree:
        """The state after step(state, o) at every distance o at which the group attends to keys."""
        if self.leaf.causal:
            state, last = step(state, 0), -1
        else:
            last = group.ahead
        count = last + 1 + group.behind
        return lax.fori_loop(0, count, lambda i, state: step(state, last - i), state)

    # ------------------------------------------------------------------------------ forward

    def outputs(self, read: Reads, v: Array, before: object = None) -> tuple[Array, Array]:
        assert before is None, "packed calls have no keys outside of the call"
        v = self._keys(v)

        def of_group(group: BlockGroup) -> tuple[Array, Array]:
            def add(state: Tree, o: Array | int) -> Tree:
                j = group.first + o
                tile = self._tile(group, o, self._at(self.k, j))
                return read.add(state, tile, self._at(v, j))

            state = read.start((*group.q.shape[:3], v.shape[4]), v)
            return read.finish(self._at_each_distance(group, add, state))

        o, log_total = lax.map(of_group, self.each)
        return self._stack(o), self._stack(log_total)

    def _stack(self, x: Array) -> Array:
        """(groups, G b, …) as (blocks, b, …)."""
        return jnp.reshape(x, (-1, self.b, *x.shape[2:]))[: self.blocks.count]

    # ----------------------------------------------------------------------------- backward

    def _pulled(self, read: Reads, v: Array, rows: ReadRows) -> Sums:
        v = self._keys(v)
        # Blocks after the last one have no weights.
        of_groups = ReadRows(
            self._rows(rows.log_total, math.inf), self._rows(rows.o), self._rows(rows.d_o)
        )

        def of_group(sums: tuple[Array, Array], x: tuple[BlockGroup, ReadRows]) -> Tree:
            group, own_rows = x

            def pull(carry: tuple[Array, Array, Array], o: Array | int) -> Tree:
                d_k, d_v, d_q = carry
                j = group.first + o
                k = self._at(self.k, j)
                d_tile, d_values = read.pull(self._tile(group, o, k), self._at(v, j), own_rows)
                if self.leaf.softcap is not None:
                    scores = product_with_transposed(group.q, k)
                    d_tile = d_tile * slope(scores, self.leaf.softcap)
                d_k = self._added(d_k, j, transposed_product(d_tile, group.q))
                return d_k, self._added(d_v, j, d_values), d_q + product(d_tile, k)

            carry = (*sums, zeros(group.q.shape, group.q))
            d_k, d_v, d_q = self._at_each_distance(group, pull, carry)
            return (d_k, d_v), d_q

        sums = (zeros(self.k.shape, self.k), zeros(v.shape, v))
        (d_k, d_v), d_q = lax.scan(of_group, sums, (self.each, of_groups))
        return {"q": self._stack(d_q), "k": self._tokens(d_k), "v": self._tokens(d_v)}
