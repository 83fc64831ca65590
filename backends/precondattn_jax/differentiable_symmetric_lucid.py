"""LUCID without causality, which JAX can differentiate any number of times.

    (Φ + ρ I) y = v

A derivative of y is another solve, with the derivative of the product on the right-hand side. Only
the product is differentiated: row by row of blocks, without the symmetry that saves half of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array, lax

import precondattn as pa
from precondattn.frame import Frame
from precondattn.spec.array_functions import identity_like, where_valid
from precondattn_jax.arithmetic import JAX, product, zeros
from precondattn_jax.layout import heads_first
from precondattn_jax.loops import DIFFERENTIABLE
from precondattn_jax.lower_system import joined
from precondattn_jax.symmetric_lucid import Similarities


def output(leaf: pa.SymmetricLucidSolve, x: Mapping[str, Array], frame: Frame) -> Array:
    """y (b, s, n, e)"""
    unit = leaf.unit_keys(heads_first(x["k"]))
    phi, constant = (Similarities(leaf, k, frame) for k in (unit, lax.stop_gradient(unit)))
    blocks = phi.blocks

    def times(y: Array) -> Array:
        y = blocks.of_keys(y)

        def of_block(a: Array) -> Array:
            first = phi.mask.first(a)

            def add(i: Array, total: Array) -> Array:
                j = first + i
                tile = phi.tile(a, j)
                own = (identity_like(tile) == 1) & (j == a)
                return total + product(jnp.where(own, 1.0 + leaf.rho, tile), blocks.take(y, j))

            start = zeros(blocks.take(y, a).shape, y)
            return DIFFERENTIABLE.counted(blocks.keys, phi.mask.stop(a) - first, add, start)

        return joined(DIFFERENTIABLE.each(of_block, blocks.rows))[:, :, : blocks.s]

    y = lax.custom_linear_solve(
        times,
        where_valid(heads_first(x["v"]), frame),
        solve=lambda _, right: constant.solved(JAX, right),
        symmetric=True,
    )
    return heads_first(y)
