"""Tiles of dot products, and their gradient.

    S = q kᵀ,    dq = dS k,    dk = dSᵀ q

The loops use a metric only through this interface; `transported_scores.py` has the other metric.
"""

from __future__ import annotations

from jax import Array

from precondattn_jax.arithmetic import (
    product,
    product_with_transposed,
    transposed_product,
    zeros,
)
from precondattn_jax.layout import QueryBlocks

Sums = dict[str, Array]
"""Gradients that the tiles add to."""


class DotScores:
    """Queries in blocks (blocks, b, n, r C, d) and keys (b, n, s, d), padded to whole blocks."""

    def __init__(self, blocks: QueryBlocks, q: Array, k: Array) -> None:
        self.blocks, self.q, self.k = blocks, q, k

    # Forward: the tile on the diagonal, then the preceding tiles, nearest first.

    def start(self, a: Array) -> Array:
        """The queries of block a as used with preceding key blocks."""
        return self.blocks.row(self.q, a)

    def diagonal(self, a: Array) -> Array:
        """The tile on the diagonal, valid on and below its diagonal."""
        return self.tile(self.start(a), a)

    def tile(self, x: Array, j: Array) -> Array:
        """Scores of queries x, carried to block j, with the keys of block j."""
        return product_with_transposed(x, self.blocks.take(self.k, j))

    def carried(self, x: Array, j: Array) -> Array:
        """Queries carried from block j to block j − 1."""
        return x

    # Backward: the preceding tiles, first one first, then the tile on the diagonal.

    def sums(self) -> Sums:
        return {"k": zeros(self.k.shape, self.k)}

    def trail(self, a: Array, first: Array) -> Array:
        """The queries of block a, carried to each block from `first` on."""
        return self.start(a)

    def on_trail(self, trail: Array, j: Array) -> Array:
        return trail

    def pulled(
        self, sums: Sums, trail: Array, y: Array, j: Array, d_tile: Array
    ) -> tuple[Sums, Array]:
        """Gradients from a tile's: the sums with its part, and y, the queries' gradient so far."""
        blocks = self.blocks
        d_k = blocks.add(sums["k"], j, transposed_product(d_tile, trail))
        return sums | {"k": d_k}, y + product(d_tile, blocks.take(self.k, j))

    def pulled_diagonal(
        self, sums: Sums, a: Array, y: Array, d_diagonal: Array
    ) -> tuple[Sums, Array]:
        """The same for the tile on the diagonal: the sums, and dq of the block."""
        return self.pulled(sums, self.start(a), y, a, d_diagonal)

    def gradients(self, sums: Sums) -> Sums:
        """dk, and the gradients of the metric's other inputs."""
        return sums
