"""The gradient of LUCID's solve: a transposed solve, with its tiles recomputed.

From the last block to the first, with R = dy,

    X_J = δ_J⁻¹ (I + β'_J stril(Φ_JJ))⁻ᵀ R_J,    dv_J = β_J X_J,    R_I −= Φ_JIᵀ dv_J    (I < J),
    dS_J = −(dv_J yᵀ) ∘ Φ_J,    dβ_J = X_J · (v_J − stril(Φ)_J y),

and dS is propagated through the scores and the norm of the keys while Φ_J is available.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from precondattn.arrays import Arrays, Tree
from precondattn.spec.array_functions import row_sum
from precondattn.spec.rms_norm import rms_norm_vjp
from precondattn_jax.arithmetic import product, product_with_transposed, transposed_product, zeros
from precondattn_jax.layout import heads_first
from precondattn_jax.lucid_system import LucidSystem


def gradients(system: LucidSystem, out: Array, cotangent: Array) -> Arrays:
    """Gradients by input, from that of y (b, s, n, e)."""
    blocks, scores, leaf = system.blocks, system.scores, system.leaf
    y, right = (blocks.of_keys(heads_first(a)) for a in (out, cotangent))

    def of_block(carry: tuple[Tree, Array], a: Array) -> tuple[Tree, Tree]:
        sums, right = carry
        rows = system.rows(a)
        within = rows.among()
        solved = transposed_product(rows.inverse(within), blocks.take(right, a)) / rows.diagonal
        d_v, v = rows.strength * solved, blocks.take(system.v, a)
        first = system.mask.first(a)
        trail = scores.trail(a, first)

        def scored(weights: Array, known: Array, j: Array) -> Array:
            """dS of a tile."""
            d_tile = -product_with_transposed(d_v, known) * weights
            if rows.maxima is None or leaf.detach_max:
                return d_tile
            column = j * blocks.size + jnp.arange(blocks.size)
            return d_tile + jnp.where(rows.maxima.first == column, row_sum(d_v * v), 0.0)

        def pull(i: Array, carry: Tree) -> Tree:
            sums, right, d_rows, residual = carry
            j = first + i
            weights = rows.weights(scores.tile(scores.on_trail(trail, j), j), j)
            known = blocks.take(y, j)
            right = blocks.add(right, j, -transposed_product(weights, d_v))
            sums, d_rows = scores.pulled(sums, trail, d_rows, j, scored(weights, known, j))
            if leaf.beta:
                residual = residual - product(weights, known)
            return sums, right, d_rows, residual

        d_rows = zeros(scores.q.shape[1:], scores.q)
        start = (sums, right, d_rows, v if leaf.beta else None)
        sums, right, d_rows, residual = lax.fori_loop(0, a - first, pull, start)
        known = blocks.take(y, a)
        d_within = scored(within, known, a)
        if not leaf.has_unit_diagonal:
            d_diagonal = row_sum(d_v * known) * rows.diagonal
            d_within = d_within - jnp.eye(blocks.size, dtype=d_within.dtype) * d_diagonal
        sums, d_rows = scores.pulled_diagonal(sums, a, d_rows, d_within)
        d_beta = row_sum(solved * (residual - product(within, known))) if leaf.beta else None
        return (sums, right), (d_rows, d_v, d_beta)

    start = (scores.sums(), right)
    (sums, _), (d_rows, d_v, d_beta) = lax.scan(of_block, start, blocks.rows, reverse=True)
    of_scores = scores.gradients(sums)
    d_unit = heads_first(blocks.unstacked(d_rows, 1)) * system.scale
    d_unit = d_unit + of_scores["k"][:, :, : blocks.s]
    if leaf.normalize == "keys":
        d_unit = rms_norm_vjp(system.k[:, :, : blocks.s], leaf.eps, d_unit)
    result = {"k": heads_first(d_unit), "v": blocks.unstacked(d_v, 1)}
    for name in leaf.metric.inputs:
        result[name] = system.tokens(of_scores[name])
    if leaf.beta:
        result["lucid_beta"] = blocks.unstacked(d_beta, 1)[..., 0]
    return result
