"""Row blocks of dot products, and their gradient.

    S = q kᵀ,    dq = dS k,    dk = dSᵀ q

for a block of query rows and a range of keys. A soft cap (`spec/softmax.py`) is applied to the
scores of any metric:

    S ← c tanh(S / c),    dS ← dS ∘ (1 − tanh²(S / c))

A bias and a forget gate (`forget_gate.py`) are added to other scores in the same way.
"""

from __future__ import annotations

from typing import Protocol

from precondattn.arrays import Array, Arrays, Index, namespace
from precondattn.spec.array_functions import sum_to, transpose
from precondattn.spec.softmax import slope
from precondattn_portable.arithmetic import Arithmetic, Scratch, changed_at
from precondattn_portable.layout import ALL_HEADS, Tile, by_query_head


class Scores(Protocol):
    """The scores of queries (b, n, r, t, d) and keys (b, n, s, d), one tile at a time."""

    ops: Arithmetic

    def row_block(self, tile: Tile, workspace: Scratch) -> Array:
        """The scores of a tile (b, n, r (i1 − i0), high − low)."""

    def pull(self, tile: Tile, d_row_block: Array) -> None:
        """Add the gradients of the scores' inputs, from the gradient of the last tile's scores."""

    def gradients(self) -> Arrays:
        """The sums of these gradients, by input."""


def biased(ops: Arithmetic, row_block: Array, bias: Array) -> Array:
    """Scores plus a bias (b or 1, n or 1, r or 1, i1 − i0, high − low)."""
    pairs = ops.add(by_query_head(ops, row_block, bias.shape[3]), bias)
    return ops.reshape(pairs, row_block.shape)


def capped_in_place(ops: Arithmetic, scores: Array, cap: float) -> Array:
    """c tanh(S / c), in `scores` where the library can."""
    return ops.multiply(ops.tanh(ops.multiply(scores, 1.0 / cap)), cap)


class DotScores:
    """Dot products of queries and keys."""

    def __init__(self, ops: Arithmetic, q: Array, k: Array, *, gradient: bool = False) -> None:
        self.ops, self.q, self.k = ops, q, k
        if gradient:
            self.d_q, self.d_k = ops.zeros(q.shape, q), ops.zeros(k.shape, k)

    def row_block(self, tile: Tile, workspace: Scratch) -> Array:
        rows = tile.rows_of(self.q)
        keys = self.ops.transposed(self.k[tile.keys])
        return self.ops.product(rows, keys, workspace.shaped((*rows.shape[:3], keys.shape[3])))

    def pull(self, tile: Tile, d_row_block: Array) -> None:
        rows = tile.rows_of(self.q)
        d_rows = self.ops.product(d_row_block, self.k[tile.keys])
        here = tile.at(ALL_HEADS)
        self.d_q[here] = namespace(d_rows).reshape(d_rows, self.d_q[here].shape)
        self.ops.add_product_at(self.d_k, tile.keys, transpose(d_row_block), rows)

    def gradients(self) -> Arrays:
        return {"q": self.d_q, "k": self.d_k}


class CappedScores:
    """Scores with a soft cap, whose slope is kept from a row block to its gradient."""

    def __init__(self, scores: Scores, cap: float, *, gradient: bool) -> None:
        self.ops, self.scores, self.cap, self.gradient = scores.ops, scores, cap, gradient
        self.gradients = scores.gradients

    def row_block(self, tile: Tile, workspace: Scratch) -> Array:
        scores = self.scores.row_block(tile, workspace)
        if self.gradient:
            self.slope = slope(scores, self.cap)
        return capped_in_place(self.ops, scores, self.cap)

    def pull(self, tile: Tile, d_row_block: Array) -> None:
        self.scores.pull(tile, self.ops.multiply(self.slope, d_row_block))


class BiasedScores:
    """Scores plus a bias (b or 1, n or 1, r or 1, t, s), with its gradient `d_bias`."""

    def __init__(self, scores: Scores, bias: Array, d_bias: Array | None) -> None:
        self.ops, self.scores, self.bias, self.d_bias = scores.ops, scores, bias, d_bias
        self.gradients = scores.gradients

    def row_block(self, tile: Tile, workspace: Scratch) -> Array:
        row_block = self.scores.row_block(tile, workspace)
        return biased(self.ops, row_block, self.bias[_pairs(tile)])

    def pull(self, tile: Tile, d_row_block: Array) -> None:
        self.scores.pull(tile, d_row_block)
        here, d_pairs = _pairs(tile), by_query_head(self.ops, d_row_block, tile.i1 - tile.i0)
        changed_at(self.ops.add, self.d_bias, here, sum_to(d_pairs, self.bias[here].shape))


def _pairs(tile: Tile) -> Index:
    return (..., slice(tile.i0, tile.i1), slice(tile.low, tile.high))
