"""LUCID without causality, one tile of Φ at a time (the equations are in `precondattn_portable`).

    (Φ + ρ I) y = v,    z_a += Φ_aj x_j    (j ≤ a),    z_j += Φ_ajᵀ x_a    (j < a)

The iteration and its restarts are loops of the compiled call. A column whose residual is not
reached is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

import precondattn as pa
from precondattn.arrays import Arrays, Residuals, Tree
from precondattn.cache import Updates
from precondattn.frame import Frame
from precondattn.spec.array_functions import identity_like, where_valid
from precondattn.spec.positive_definite import tolerance_of
from precondattn.spec.rms_norm import rms_norm_vjp
from precondattn_jax.arithmetic import (
    full_precision,
    product,
    product_with_transposed,
    transposed_product,
    zeros,
)
from precondattn_jax.layout import QueryBlocks, block_size, heads_first, is_known
from precondattn_jax.masks import Mask
from precondattn_portable import symmetric_lucid
from precondattn_portable.algorithm import Algorithm
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.block_conjugate_gradients import (
    Directions,
    Residual,
    lengths,
    residual,
    sizes,
)

FACTORIZED = 2**24
"""The most entries of the matrices of all heads that are factorized: 64 MiB in float32."""


class Similarities:
    """Φ of a full call; arrays have heads before time, and are padded to whole blocks."""

    def __init__(self, leaf: pa.SymmetricLucidSolve, unit: Array, frame: Frame) -> None:
        b, n, s, d = unit.shape
        size = block_size(s, b * n, packed=frame.k_segment is not None)
        self.leaf, self.frame, self.blocks = leaf, frame, QueryBlocks(s, s, size)
        self.unit = self.blocks.of_keys(unit)
        self.scale = leaf.scale_for(d)
        self.shift = self.scale * d
        frame = frame.among_keys(s)
        is_whole = is_known(self.blocks.after) and self.blocks.after == 0
        if not is_whole and frame.k_valid is None:
            all_valid = jnp.ones((1, s), dtype=bool)
            frame = frame.replaced(q_valid=all_valid, k_valid=all_valid)
        self.mask = Mask(frame, self.blocks, causal=False, of_queries=True)

    def tile(self, a: Array, j: Array) -> Array:
        """Φ of a tile (b, n, C, C), with whatever its diagonal is."""
        rows = self.blocks.take(self.unit, a) * self.scale
        scores = product_with_transposed(rows, self.blocks.take(self.unit, j))
        return self.mask.apply(jnp.exp(scores - self.shift), a, j, otherwise=0.0)

    def diagonal(self, a: Array, own: float) -> Array:
        """Φ of the tile of block a, and `own` on its diagonal."""
        tile = self.tile(a, a)
        return jnp.where(identity_like(tile) == 1, own, tile)

    def summed(
        self, x: Array, own: float, weighted: Callable[[Array, Array, Array], Array]
    ) -> Array:
        """Σ_j weighted(Φ_aj) x_j, for a symmetric matrix."""
        blocks = self.blocks

        def of_rows(total: Array, a: Array) -> tuple[Array, None]:
            here = blocks.take(x, a)

            def add(j: Array, total: Array) -> Array:
                tile = weighted(self.tile(a, j), a, j)
                total = blocks.add(total, a, product(tile, blocks.take(x, j)))
                return blocks.add(total, j, transposed_product(tile, here))

            tile = weighted(self.diagonal(a, own), a, a)
            total = blocks.add(total, a, product(tile, here))
            return lax.fori_loop(self.mask.first(a), a, add, total), None

        total, _ = lax.scan(of_rows, zeros(x.shape, x), blocks.rows)
        return total

    def times(self, x: Array) -> Array:
        """(Φ + ρ I) x"""
        return self.summed(x, 1.0 + self.leaf.rho, lambda tile, a, j: tile)

    def pulled(self, x: Array, y: Array) -> Array:
        """dk̂, from the solution x of the gradient and y."""
        left, right = (jnp.concatenate(pair, axis=-1) for pair in ((x, y), (y, x)))

        def weighted(tile: Array, a: Array, j: Array) -> Array:
            pairs = product_with_transposed(self.blocks.take(left, a), self.blocks.take(right, j))
            return pairs * tile

        return -self.scale * self.summed(self.unit, 0.0, weighted)

    def _is_small(self, right: Array) -> bool:
        """Whether matrices are factorized. Those of a symbolic size are not."""
        b, n, s, _ = right.shape
        if not is_known(b, n, s):
            return False
        is_small: bool = s <= symmetric_lucid.DIRECT and b * n * s * s <= FACTORIZED
        return is_small

    def solved(self, ops: Arithmetic, right: Array) -> Array:
        """(Φ + ρ I)⁻¹ right (b, n, s, e)."""
        s = right.shape[2]
        if self._is_small(right):
            with full_precision():
                similarities = self.leaf.similarities(self.unit[:, :, :s], self.frame)
                return self.leaf.solved(similarities, right)
        tolerance = tolerance_of(self.leaf, right)
        right = self.blocks.of_keys(right)
        return solved(ops, self.times, right, tolerance, self.leaf.iterations)[:, :, :s]


def solved(
    ops: Arithmetic,
    times: Callable[[Array], Array],
    right: Array,
    tolerance: float,
    iterations: int,
) -> Array:
    """X with A X = B, whose columns are NaN where the residual is not reached."""
    size = sizes(right)
    right = right / size
    wanted = tolerance * lengths(right)

    def is_open(carry: Tree) -> Array:
        step, used = carry
        return (used < iterations) & jnp.any(Residual(lengths(step.c), wanted).is_large())

    def advanced(carry: Tree) -> Tree:
        step, used = carry
        return step.advanced(ops, times), used + 1

    def is_left(carry: Tree) -> Array:
        _, _, left, used = carry
        return (used < iterations) & jnp.any(left.is_large())

    def again(carry: Tree) -> Tree:
        x, rest, _, used = carry
        step, used = lax.while_loop(is_open, advanced, (Directions.towards(rest), used))
        x = x + step.x
        return x, *residual(times, x, right, wanted), used

    at_first = Residual(lengths(right), wanted)
    x, _, left, _ = lax.while_loop(is_left, again, (right * 0, right, at_first, 0))
    return jnp.where(left.is_small(), x * size, math.nan)


class SymmetricLucidSolveBlocks(Algorithm[pa.SymmetricLucidSolve]):
    """Algorithm of the leaf `SymmetricLucidSolve`."""

    name = "Cholesky or conjugate gradients"

    def forward(self, x: Arrays, frame: Frame) -> tuple[Array, Residuals]:
        phi = Similarities(self.leaf, self.leaf.unit_keys(heads_first(x["k"])), frame)
        return heads_first(phi.solved(self.ops, where_valid(heads_first(x["v"]), frame))), ()

    def backward(
        self, x: Arrays, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        leaf = self.leaf
        k = heads_first(x["k"])
        phi = Similarities(leaf, leaf.unit_keys(k), frame)
        y, d_y = (where_valid(heads_first(z), frame) for z in (out, cotangent))
        d_v = phi.solved(self.ops, d_y)
        d_k = phi.pulled(*(phi.blocks.of_keys(z) for z in (d_v, y)))[:, :, : phi.blocks.s]
        if leaf.normalize == "keys":
            d_k = rms_norm_vjp(k, leaf.eps, d_k)
        return {"k": heads_first(d_k), "v": heads_first(d_v)}

    def step(self, past: Arrays, x: Arrays, frame: Frame) -> tuple[Array, Updates]:
        out: tuple[Array, Updates] = self.leaf.step(past, x, frame)
        return out
