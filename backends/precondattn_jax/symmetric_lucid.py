"""LUCID without causality, one tile of Φ at a time (the equations are in `precondattn_portable`).

    (Φ + ρ I) y = v,    z_a += Φ_aj x_j    (j ≤ a),    z_j += Φ_ajᵀ x_a    (j < a)

The iteration and its restarts are loops of the compiled call. A column whose residual stays too
large is NaN. A derivative of y is another solve, with the derivative of the product on the
right-hand side. So only the product is differentiated, in a form that computes one row of blocks
after another and does not use the symmetry, which would halve the work.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

import precondattn as pa
from precondattn.arrays import Arrays, Residuals
from precondattn.frame import Frame
from precondattn.spec.array_functions import identity_like, where_valid
from precondattn.spec.positive_definite import tolerance_of
from precondattn.spec.rms_norm import rms_norm_vjp
from precondattn_jax.arithmetic import (
    JAX,
    full_precision,
    product,
    product_with_transposed,
    transposed_product,
    zeros,
)
from precondattn_jax.definition import AlgorithmInLoops
from precondattn_jax.layout import BlockedCall, heads_first, is_known, joined
from precondattn_jax.loops import DIFFERENTIABLE, refined
from precondattn_jax.masks import Mask
from precondattn_portable import symmetric_lucid
from precondattn_portable.block_conjugate_gradients import (
    Directions,
    Residual,
    lengths,
    residual,
    sizes,
)

FACTORIZED = 2**24
"""The most entries of the matrices of all heads that are factorized: 64 MiB in float32."""


class Similarities(BlockedCall[pa.SymmetricLucidSolve]):
    """Φ of a full call; arrays have heads before time, and are padded to whole blocks."""

    def __init__(self, leaf: pa.SymmetricLucidSolve, x: Arrays, frame: Frame) -> None:
        super().__init__(leaf, x, frame, queries="k")
        s = self.blocks.s
        self.unit = self.blocks.of_keys(leaf.unit_keys(heads_first(x["k"])))
        self.scale = leaf.scale_for(self.d)
        self.shift = self.scale * self.d
        frame = frame.among_keys(s)
        is_whole = is_known(self.blocks.after) and self.blocks.after == 0
        if not is_whole and frame.k_valid is None:
            all_valid = jnp.ones((1, s), dtype=bool)
            frame = frame.replaced(q_valid=all_valid, k_valid=all_valid)
        self.mask = Mask(frame, self.blocks, causal=False, of_queries=True)

    def valid(self, x: Array) -> Array:
        """(b, s, n, …) with heads before time, 0 at masked tokens."""
        return where_valid(heads_first(x), self.frame)

    def tile(self, a: Array, j: Array) -> Array:
        """Φ of a tile (b, n, C, C), without a fixed diagonal."""
        rows = self.blocks.take(self.unit, a) * self.scale
        scores = product_with_transposed(rows, self.blocks.take(self.unit, j))
        return self.mask.apply(jnp.exp(scores - self.shift), a, j, otherwise=0.0)

    def summed(self, x: Array, own: float, weighted: Callable[..., Array]) -> Array:
        """Σ_j weighted(Φ_aj, a, j) x_j, for a symmetric matrix with `own` on Φ's diagonal."""
        blocks = self.blocks

        def of_rows(total: Array, a: Array) -> tuple[Array, None]:
            rows = blocks.take(x, a)

            def add(j: Array, total: Array) -> Array:
                tile = weighted(self.tile(a, j), a, j)
                total = blocks.add(total, a, product(tile, blocks.take(x, j)))
                return blocks.add(total, j, transposed_product(tile, rows))

            tile = self.tile(a, a)
            tile = weighted(jnp.where(identity_like(tile) == 1, own, tile), a, a)
            total = blocks.add(total, a, product(tile, rows))
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

    def solved(self, right: Array) -> Array:
        """(Φ + ρ I)⁻¹ right (b, n, s, e)."""
        leaf, (b, n, s, _) = self.leaf, right.shape
        may_be_small = is_known(b, n, s)  # Systems of a symbolic size are not factorized.
        if may_be_small and s <= symmetric_lucid.DIRECT and b * n * s * s <= FACTORIZED:
            with full_precision():
                similarities = leaf.similarities(self.unit[:, :, :s], self.frame)
                return leaf.solved(similarities, right)
        tolerance, right = tolerance_of(leaf, right), self.blocks.of_keys(right)
        size = sizes(right)
        right = right / size
        wanted = tolerance * lengths(right)
        x = refined(
            right,
            Residual(lengths(right), wanted),
            leaf.iterations,
            Directions.towards,
            lambda step: step.advanced(JAX, self.times),
            lambda step: Residual(lengths(step.c), wanted),
            lambda x: residual(self.times, x, right, wanted),
        )
        return (x * size)[:, :, :s]

    def times_row_by_row(self, x: Array) -> Array:
        """(Φ + ρ I) x (b, n, s, e), which JAX can differentiate any number of times."""
        blocks, x = self.blocks, self.blocks.of_keys(x)

        def of_block(a: Array) -> Array:
            first = self.mask.first(a)

            def add(i: Array, total: Array) -> Array:
                j = first + i
                tile = self.tile(a, j)
                is_own = (identity_like(tile) == 1) & (j == a)
                tile = jnp.where(is_own, 1.0 + self.leaf.rho, tile)
                return total + product(tile, blocks.take(x, j))

            start = zeros(blocks.take(x, a).shape, x)
            return DIFFERENTIABLE.counted(blocks.keys, self.mask.stop(a) - first, add, start)

        return joined(DIFFERENTIABLE.each(of_block, blocks.rows))[:, :, : blocks.s]


class SymmetricLucidSolveBlocks(
    AlgorithmInLoops[pa.SymmetricLucidSolve], symmetric_lucid.SymmetricLucidSolveBlocks
):
    """Algorithm of the leaf `SymmetricLucidSolve`."""

    def forward(self, x: Arrays, frame: Frame) -> tuple[Array, Residuals]:
        phi = Similarities(self.leaf, x, frame)
        return heads_first(phi.solved(phi.valid(x["v"]))), ()

    def output(self, x: Arrays, frame: Frame) -> Array:
        phi = Similarities(self.leaf, x, frame)
        constant = Similarities(self.leaf, lax.stop_gradient(x), frame)
        y = lax.custom_linear_solve(
            phi.times_row_by_row,
            phi.valid(x["v"]),
            solve=lambda _, right: constant.solved(right),
            symmetric=True,
        )
        return heads_first(y)

    def backward(
        self, x: Arrays, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        leaf, phi = self.leaf, Similarities(self.leaf, x, frame)
        d_v = phi.solved(phi.valid(cotangent))
        d_k = phi.pulled(*map(phi.blocks.of_keys, (d_v, phi.valid(out))))[:, :, : phi.blocks.s]
        if leaf.normalize == "keys":
            d_k = rms_norm_vjp(heads_first(x["k"]), leaf.eps, d_k)
        return {"k": heads_first(d_k), "v": heads_first(d_v)}
