"""Block lower-triangular systems, whose solutions JAX can differentiate any number of times.

    E y = b,    E = diag(δ) + diag(β) stril(W)

A derivative of y is another solve, with the derivative of the product E y on the right-hand side.
So only products with W are differentiated, which are linear in memory; the loops of the solves are
not. Forward, block after block, and backward for Eᵀ x = r:

    y_I = (I + β'_I stril(W_II))⁻¹ δ_I⁻¹ (b_I − β_I Σ_{J<I} W_IJ y_J),    β' = β / δ,
    x_I = δ_I⁻¹ (I + β'_I stril(W_II))⁻ᵀ r_I,    r_J −= W_IJᵀ β_I x_I    (J < I).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import jax.numpy as jnp
from jax import Array, lax

from precondattn_jax.arithmetic import product, transposed_product, zeros
from precondattn_jax.layout import QueryBlocks
from precondattn_jax.loops import DIFFERENTIABLE
from precondattn_jax.masks import Mask
from precondattn_jax.triangular_inverse import unit_lower_inverse


class LowerSystem(Protocol):
    """E of a call, one tile at a time; arrays have heads before time, (b, n, s, …)."""

    blocks: QueryBlocks
    mask: Mask

    def start(self, a: Array) -> Array:
        """The rows of block a as used with the block before it."""

    def carried(self, x: Array, j: Array) -> Array:
        """Rows carried from block j to block j − 1."""

    def preceding(self, x: Array, a: Array, j: Array) -> Array:
        """W_aj of rows x, carried to block j < a."""

    def among(self, a: Array) -> Array:
        """stril(W_aa)"""

    def strength(self, a: Array) -> Array | float:
        """β of block a (b, n, C, 1)."""

    def diagonal(self, a: Array) -> Array | float:
        """δ of block a (b, n, C, 1)."""


def products(system: LowerSystem, y: Array) -> Array:
    """stril(W) y, which can be differentiated."""
    blocks = system.blocks

    def of_block(a: Array) -> Array:
        def add(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            total, x = carry
            j = a - 1 - i
            tile = system.preceding(x, a, j)
            return total + product(tile, blocks.take(y, j)), system.carried(x, j)

        total = product(system.among(a), blocks.take(y, a))
        count = a - system.mask.first(a)
        total, _ = DIFFERENTIABLE.counted(blocks.keys, count, add, (total, system.start(a)))
        return total

    return joined(DIFFERENTIABLE.each(of_block, blocks.rows))


def solved(system: LowerSystem, constant: LowerSystem, right: Array) -> Array:
    """E⁻¹ right (b, n, s, e); `constant` is the same system, of arrays without a derivative."""

    def times(y: Array) -> Array:
        strength, diagonal = (_of_all(system, f) for f in (system.strength, system.diagonal))
        return diagonal * y + strength * products(system, y)

    solution: Array = lax.custom_linear_solve(
        times,
        right,
        solve=lambda _, right: _substituted(constant, right),
        transpose_solve=lambda _, right: _substituted_back(constant, right),
    )
    return solution


def joined(stack: Array) -> Array:
    """(blocks, b, n, C, c) as (b, n, s, c)."""
    count, b, n, size, c = stack.shape
    return jnp.reshape(jnp.moveaxis(stack, 0, 2), (b, n, count * size, c))


def _of_all(system: LowerSystem, of_block: Callable[[Array], Array | float]) -> Array | float:
    """Numbers of all rows, from those of a block."""
    first = of_block(system.blocks.rows[0])
    return first if isinstance(first, float) else joined(lax.map(of_block, system.blocks.rows))


def _inverse(system: LowerSystem, a: Array) -> Array:
    return unit_lower_inverse(system.strength(a) / system.diagonal(a) * system.among(a))


def _substituted(system: LowerSystem, right: Array) -> Array:
    blocks = system.blocks

    def of_block(y: Array, a: Array) -> tuple[Array, None]:
        def add(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            known, x = carry
            j = a - 1 - i
            tile = system.preceding(x, a, j)
            return known + product(tile, blocks.take(y, j)), system.carried(x, j)

        own = blocks.take(right, a)
        start = (zeros(own.shape, right), system.start(a))
        known, _ = lax.fori_loop(0, a - system.mask.first(a), add, start)
        rest = (own - system.strength(a) * known) / system.diagonal(a)
        return blocks.put(y, a, product(_inverse(system, a), rest)), None

    return lax.scan(of_block, zeros(right.shape, right), blocks.rows)[0]


def _substituted_back(system: LowerSystem, right: Array) -> Array:
    blocks = system.blocks

    def of_block(right: Array, a: Array) -> tuple[Array, Array]:
        solution = transposed_product(_inverse(system, a), blocks.take(right, a))
        solution = solution / system.diagonal(a)
        weighted = system.strength(a) * solution

        def take(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            right, x = carry
            j = a - 1 - i
            part = transposed_product(system.preceding(x, a, j), weighted)
            return blocks.add(right, j, -part), system.carried(x, j)

        start = (right, system.start(a))
        right, _ = lax.fori_loop(0, a - system.mask.first(a), take, start)
        return right, solution

    return joined(lax.scan(of_block, right, blocks.rows, reverse=True)[1])
