"""Tiles of dot products, and their gradient.

    S = q kᵀ,    dq = dS k,    dk = dSᵀ q

The loops use a metric only through this interface; `transported_scores.py` has the other metric.
"""

from __future__ import annotations

from collections.abc import Callable

from jax import Array

from precondattn.arrays import Tree
from precondattn.spec.softmax import capped, slope
from precondattn_jax.arithmetic import product, product_with_transposed, transposed_product, zeros
from precondattn_jax.layout import QueryBlocks
from precondattn_jax.loops import PLAIN, Loops

Sums = dict[str, Array]
"""Gradients that the tiles add to."""

Pulled = tuple[Sums, Array]
"""The sums, and the gradient of the queries."""

Step = Callable[[Tree, Array, Array], Tree]
"""A function of a state, a tile and its block of keys, to the next state."""


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

    def over(
        self, a: Array, first: Array, stop: Array, step: Step, state: Tree, loops: Loops = PLAIN
    ) -> Tree:
        """The state after the tiles of block a with blocks `stop` − 1, …, `first` of keys."""
        x = self.start(a)

        def add(i: Array, state: Tree) -> Tree:
            j = stop - 1 - i
            return step(state, self.tile(x, j), j)

        return loops.counted(self.blocks.keys, stop - first, add, state)

    # Backward: the preceding tiles, from the first on, then the tile on the diagonal.

    def sums(self) -> Sums:
        return {"k": zeros(self.k.shape, self.k)}

    def trail(self, a: Array, first: Array) -> Array:
        """The queries of block a, carried to each block from `first` on."""
        return self.start(a)

    def on_trail(self, trail: Array, j: Array) -> Array:
        return trail

    def pulled(self, sums: Sums, trail: Array, y: Array, j: Array, d_tile: Array) -> Pulled:
        """Gradients from a tile's: the sums with its part, and y, the queries' gradient so far."""
        d_k = self.blocks.add(sums["k"], j, transposed_product(d_tile, trail))
        return sums | {"k": d_k}, y + product(d_tile, self.blocks.take(self.k, j))

    def pulled_diagonal(self, sums: Sums, a: Array, y: Array, d_diagonal: Array) -> Pulled:
        """Gradients from the tile on the diagonal's: the sums, and dq of the block."""
        return self.pulled(sums, self.start(a), y, a, d_diagonal)

    def gradients(self, sums: Sums) -> Sums:
        """dk, and the gradients of the metric's other inputs."""
        return sums


class CappedScores(DotScores):
    """Scores with a soft cap (`spec/softmax.py`): S ← c tanh(S / c), dS ← dS ∘ (1 − tanh²(S / c)).

    The gradient is written with a tile's scores computed again, which XLA merges with the first.
    """

    def __init__(self, blocks: QueryBlocks, q: Array, k: Array, cap: float) -> None:
        super().__init__(blocks, q, k)
        self.cap = cap

    def tile(self, x: Array, j: Array) -> Array:
        return capped(super().tile(x, j), self.cap)

    def pulled(self, sums: Sums, trail: Array, y: Array, j: Array, d_tile: Array) -> Pulled:
        d_tile = d_tile * slope(super().tile(trail, j), self.cap)
        return super().pulled(sums, trail, y, j, d_tile)
