"""Block lower-triangular systems, whose solutions JAX can differentiate any number of times.

    E y = b,    E = diag(δ) + diag(β) stril(W)

A derivative of y is another solve, with the derivative of the product E y on the right-hand side.
So only products with W are differentiated, which are linear in memory; the loops of the solves are
not. Forward, block after block, and backward for Eᵀ x = r:

    y_I = (I + β'_I stril(W_II))⁻¹ δ_I⁻¹ (b_I − β_I Σ_{J<I} W_IJ y_J),    β' = β / δ,
    x_I = δ_I⁻¹ (I + β'_I stril(W_II))⁻ᵀ r_I,    r_J −= W_IJᵀ β_I x_I    (J < I).

The diagonal block is inverted by products (`triangular_inverse.py`).
"""

from __future__ import annotations

from typing import Protocol

from jax import Array, lax

from precondattn.arrays import Tree
from precondattn_jax.arithmetic import product, transposed_product, zeros
from precondattn_jax.dot_scores import DotScores, Step
from precondattn_jax.layout import QueryBlocks, joined
from precondattn_jax.loops import DIFFERENTIABLE, PLAIN, Loops
from precondattn_jax.masks import Mask
from precondattn_jax.triangular_inverse import unit_lower_inverse


class LowerRows:
    """The rows of E of block a, one tile at a time; arrays have heads before time."""

    strength: Array | float = 1.0
    """β (b, n, C, 1)"""
    diagonal: Array | float = 1.0
    """δ (b, n, C, 1)"""

    def __init__(self, scores: DotScores, mask: Mask, a: Array) -> None:
        self.scores, self.mask, self.a = scores, mask, a

    def weights(self, tile: Array, j: Array, *, diagonal: bool = False) -> Array:
        """W of the scores with block j; `diagonal` declares a = j."""
        raise NotImplementedError

    def among(self) -> Array:
        """stril(W_aa)"""
        return self.weights(self.scores.diagonal(self.a), self.a, diagonal=True)

    def inverse(self, among: Array) -> Array:
        """(I + β' stril(W_aa))⁻¹"""
        return unit_lower_inverse(self.strength / self.diagonal * among)

    def over_preceding(self, step: Step, state: Tree, loops: Loops = PLAIN) -> Tree:
        """The state after step(state, W_aj, j) for each j < a, nearest first."""

        def weighted(state: Tree, tile: Array, j: Array) -> Tree:
            return step(state, self.weights(tile, j), j)

        a = self.a
        return self.scores.over(a, self.mask.first(a), a, weighted, state, loops)


class LowerSystem(Protocol):
    """The matrix E of a call."""

    blocks: QueryBlocks

    def rows(self, a: Array) -> LowerRows:
        """The rows of block a."""


def products(system: LowerSystem, y: Array) -> Array:
    """stril(W) y, which can be differentiated."""
    blocks = system.blocks

    def of_block(a: Array) -> Array:
        def add(total: Array, weights: Array, j: Array) -> Array:
            return total + product(weights, blocks.take(y, j))

        rows = system.rows(a)
        total = product(rows.among(), blocks.take(y, a))
        return rows.over_preceding(add, total, DIFFERENTIABLE)

    return joined(DIFFERENTIABLE.each(of_block, blocks.rows))


def solved(system: LowerSystem, constant: LowerSystem, right: Array) -> Array:
    """E⁻¹ right (b, n, s, e); `constant` is the same system, whose arrays have no derivative."""

    def times(y: Array) -> Array:
        strength, diagonal = (_of_all(system, name) for name in ("strength", "diagonal"))
        return diagonal * y + strength * products(system, y)

    return lax.custom_linear_solve(
        times,
        right,
        solve=lambda _, right: substituted(constant, right),
        transpose_solve=lambda _, right: _substituted_back(constant, right),
    )


def _of_all(system: LowerSystem, name: str) -> Array | float:
    """The attribute of that name, for the rows of all blocks."""
    rows = system.blocks.rows
    first = getattr(system.rows(rows[0]), name)
    if isinstance(first, float):
        return first
    return joined(lax.map(lambda a: getattr(system.rows(a), name), rows))


def substituted(system: LowerSystem, right: Array) -> Array:
    """E⁻¹ right (b, n, s, e)."""
    blocks = system.blocks

    def of_block(y: Array, a: Array) -> tuple[Array, None]:
        def add(total: Array, weights: Array, j: Array) -> Array:
            return total + product(weights, blocks.take(y, j))

        rows, right_rows = system.rows(a), blocks.take(right, a)
        known = rows.over_preceding(add, zeros(right_rows.shape, right))
        rest = (right_rows - rows.strength * known) / rows.diagonal
        return blocks.put(y, a, product(rows.inverse(rows.among()), rest)), None

    return lax.scan(of_block, zeros(right.shape, right), blocks.rows)[0]


def _substituted_back(system: LowerSystem, right: Array) -> Array:
    blocks = system.blocks

    def of_block(right: Array, a: Array) -> tuple[Array, Array]:
        rows = system.rows(a)
        solution = transposed_product(rows.inverse(rows.among()), blocks.take(right, a))
        solution = solution / rows.diagonal
        weighted = rows.strength * solution

        def take(right: Array, weights: Array, j: Array) -> Array:
            return blocks.add(right, j, -transposed_product(weights, weighted))

        return rows.over_preceding(take, right), solution

    return joined(lax.scan(of_block, right, blocks.rows, reverse=True)[1])
