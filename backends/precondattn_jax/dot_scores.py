"""Tiles of dot products, and their gradient.

    S = q kᵀ,    dq = dS k,    dk = dSᵀ q

The loops know no more of a metric than what is here: `transported_scores.py` has the other one.
"""

from __future__ import annotations

from typing import Any

from jax import Array

from precondattn_jax.arithmetic import (
    product,
    product_with_transposed,
    transposed_product,
    zeros,
)
from precondattn_jax.layout import Blocks

Sums = dict[str, Array]
"""Gradients that the tiles add to."""


class DotScores:
    """Of queries in blocks (blocks, b, n, r C, d), and keys (b, n, s, d), both of whole blocks."""

    def __init__(self, blocks: Blocks, q: Array, k: Array) -> None:
        self.blocks, self.q, self.k = blocks, q, k

    # Forward: the block's own tile, and then those in front of it, from the nearest on.

    def start(self, a: Array) -> Array:
        """The queries of block a as the tiles in front of it see them."""
        return self.blocks.row(self.q, a)

    def diagonal(self, a: Array) -> Array:
        """The tile of a and a, right on and below the diagonal."""
        return self.tile(self.start(a), a)

    def tile(self, x: Array, j: Array) -> Array:
        """Of queries as block j sees them."""
        return product_with_transposed(x, self.blocks.at(self.k, j))

    def carried(self, x: Array, j: Array) -> Array:
        """Queries as block j sees them, as j − 1 does."""
        return x

    # Backward: the tiles in front from the first on, and the block's own one at the end.

    def sums(self) -> Sums:
        return {"k": zeros(self.k.shape, self.k)}

    def trail(self, a: Array, first: Array) -> Any:
        """The queries of block a as each of the blocks from `first` on sees them."""
        return self.start(a)

    def on_trail(self, trail: Any, j: Array) -> Array:
        return trail

    def pulled(
        self, sums: Sums, trail: Any, y: Array, j: Array, d_tile: Array
    ) -> tuple[Sums, Array]:
        """What a tile's gradient means: the sums, and y of the queries up to this block."""
        blocks = self.blocks
        d_k = blocks.add(sums["k"], j, transposed_product(d_tile, trail))
        return sums | {"k": d_k}, y + product(d_tile, blocks.at(self.k, j))

    def pulled_diagonal(
        self, sums: Sums, a: Array, y: Array, d_diagonal: Array
    ) -> tuple[Sums, Array]:
        """The same of the block's own tile: the sums, and dq of the block."""
        return self.pulled(sums, self.start(a), y, a, d_diagonal)

    def gradients(self, sums: Sums) -> Sums:
        """dk, and those of the metric's own inputs."""
        return sums
