"""Biases by distance (ALiBi, tables), one row block at a time (`precondattn/spec/distance.py`).

In a full call the queries and the keys of a tile are consecutive tokens, so that the bias depends
on j − i alone: a Toeplitz matrix of C rows and W columns, made of C + W − 1 numbers,

    T_ij = f_{C − 1 − i + j},    df_u = Σ_{C − 1 − i + j = u} dT_ij.

f has one number for each j − i of a call and each head, and is computed once. So is the gradient of
the slopes or of the table, from df. In a step sequences may differ in the positions of their keys.
"""

from __future__ import annotations

from collections.abc import Iterator

from precondattn.arrays import Array, Arrays, arange_like, namespace
from precondattn.frame import Frame
from precondattn.spec.distance import added, added_vjp
from precondattn.spec.softmax import SoftmaxAttention
from precondattn_portable.arithmetic import Scratch, changed_at
from precondattn_portable.layout import Part, Tile, blocks, by_query_head, grouped_bias
from precondattn_portable.scores import Scores

TOGETHER = 2**18
"""Entries of a Toeplitz matrix that are in memory."""


def toeplitz(f: Array, rows: int) -> Array:
    """T (…, C, W) from f (…, C + W), whose last number belongs to no pair.

    Where L numbers follow each other C times, T_ij is at C − 1 + i (L − 1) + j: in rows that are
    one shorter, each begins one number earlier than the row before.
    """
    xp, (*outer, length) = namespace(f), f.shape
    every = xp.reshape(xp.broadcast_to(f[..., None, :], (*outer, rows, length)), (*outer, -1))
    shorter = xp.reshape(every[..., rows - 1 : rows * length - 1], (*outer, rows, length - 1))
    return shorter[..., : length - rows]


def toeplitz_vjp(d: Array) -> Array:
    """The gradient of f (…, C + W) from that of T (…, C, W)."""
    xp, (*outer, rows, columns) = namespace(d), d.shape
    zeros = xp.zeros_like(d[..., :1, :1])
    right = xp.broadcast_to(zeros, (*outer, rows, rows - 1))
    flat = xp.reshape(xp.concat([d, right], axis=-1), (*outer, -1))
    before = xp.broadcast_to(zeros[..., 0], (*outer, rows - 1))
    every = xp.concat([before, flat, zeros[..., 0]], axis=-1)
    return xp.sum(xp.reshape(every, (*outer, rows, rows + columns)), axis=-2)


def positions_ahead(t: int, s: int, like: Array) -> Array:
    """j − i for each number of f (t + s,), of t queries that are the last of s tokens."""
    return arange_like(t + s, like) + (1 - s)


def by_position_ahead(leaf: SoftmaxAttention, x: Arrays) -> Array:
    """f (n, r, t + s) of a full call."""
    (t, h), (s, n) = x["q"].shape[1:3], x["k"].shape[1:3]
    f = added(leaf, x, positions_ahead(t, s, x["q"]))
    return namespace(f).reshape(f, (n, h // n, t + s))


def by_position_ahead_vjp(leaf: SoftmaxAttention, x: Arrays, d_f: Array) -> Arrays:
    """The gradient of the slopes or of the table."""
    ahead = positions_ahead(x["q"].shape[1], x["k"].shape[1], x["q"])
    return added_vjp(leaf, x, ahead, namespace(d_f).reshape(d_f, (x["q"].shape[2], -1)))


def added_in_step(leaf: SoftmaxAttention, x: Arrays, part: Part, frame: Frame, tile: Tile) -> Array:
    """The bias of a step's tile (b or 1, n, r, i1 − i0, s), for some heads."""
    xp, (h, n) = namespace(x["q"]), (x["q"].shape[2], x["k"].shape[2])
    arguments: Arrays = {}
    for name in ("slopes", "bucket_table"):
        if name in x:
            heads = xp.reshape(x[name], (*x[name].shape[:-1], n, h // n))[..., part[1], :]
            arguments[name] = xp.reshape(heads, (*x[name].shape[:-1], -1))
    rows = frame.q_position[:, tile.i0 : tile.i1, None]
    ahead = frame.k_position[:, None, :] - rows
    ahead = ahead if ahead.shape[0] == 1 else ahead[part[0], ...]
    pairs = xp.permute_dims(added(leaf, arguments, ahead), (1, 0, 2, 3))
    return grouped_bias(pairs, len(range(n)[part[1]]))


class DistantScores:
    """Scores plus the bias of distances, f (n, r, t + s), with its gradient `d_f`."""

    def __init__(self, scores: Scores, f: Array, d_f: Array | None, t: int) -> None:
        self.ops, self.scores, self.f, self.d_f, self.t = scores.ops, scores, f, d_f, t
        self.gradients = scores.gradients

    def row_block(self, tile: Tile, workspace: Scratch) -> Array:
        row_block = self.scores.row_block(tile, workspace)
        rows = tile.i1 - tile.i0
        pairs = by_query_head(self.ops, row_block, rows)
        for start, stop in self._columns(tile):
            f = self.f[..., self._numbers(tile, start, stop)]
            changed_at(self.ops.add, pairs, (..., slice(start, stop)), toeplitz(f, rows))
        return namespace(pairs).reshape(pairs, row_block.shape)

    def pull(self, tile: Tile, d_row_block: Array) -> None:
        self.scores.pull(tile, d_row_block)
        xp = namespace(d_row_block)
        d_pairs = by_query_head(self.ops, d_row_block, tile.i1 - tile.i0)
        for start, stop in self._columns(tile):
            d_f = toeplitz_vjp(xp.sum(d_pairs[..., start:stop], axis=0))
            changed_at(self.ops.add, self.d_f, (..., self._numbers(tile, start, stop)), d_f)

    def _columns(self, tile: Tile) -> Iterator[tuple[int, int]]:
        """Ranges of the tile's keys, counted from its first key."""
        n, r, _ = self.f.shape
        rows = tile.i1 - tile.i0
        return blocks(tile.high - tile.low, max(TOGETHER // (n * r * rows), rows))

    def _numbers(self, tile: Tile, start: int, stop: int) -> slice:
        """The range of f that has the numbers of these keys."""
        first = self.t - tile.i1 + tile.low
        return slice(first + start, first + stop + tile.i1 - tile.i0)
