"""Tiles of soft-capped scores (`spec/soft_cap.py`), around those of a metric.

    S ← c tanh(S / c),    dS ← dS ∘ (1 − tanh²(S / c))

The gradient computes a tile's scores again: XLA finds that it has them.
"""

from __future__ import annotations

from jax import Array

from precondattn.spec.soft_cap import capped, slope
from precondattn_jax.dot_scores import DotScores, Sums


class CappedScores(DotScores):
    """Scores of the dot product, capped."""

    def __init__(self, scores: DotScores, cap: float) -> None:
        super().__init__(scores.blocks, scores.q, scores.k)
        self.cap = cap

    def tile(self, x: Array, j: Array) -> Array:
        return capped(super().tile(x, j), self.cap)

    def pulled(
        self, sums: Sums, trail: Array, y: Array, j: Array, d_tile: Array
    ) -> tuple[Sums, Array]:
        d_tile = d_tile * slope(super().tile(trail, j), self.cap)
        return super().pulled(sums, trail, y, j, d_tile)
