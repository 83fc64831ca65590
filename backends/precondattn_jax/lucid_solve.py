"""LUCID's solve as an algorithm of the backend: full calls, their gradients, and steps.

The system is in `lucid_system.py`. The gradient is a transposed solve, which recomputes the tiles
of Φ: from the last block to the first, with R = dy,

    X_J = δ_J⁻¹ (I + β'_J stril(Φ_JJ))⁻ᵀ R_J,    dv_J = β_J X_J,    R_I −= Φ_JIᵀ dv_J    (I < J),
    dS_J = −(dv_J yᵀ) ∘ Φ_J,    dβ_J = X_J · (v_J − stril(Φ)_J y),

and dS is propagated through the scores and the norm of the keys while Φ_J is available.

A step subtracts the cached tokens' part, then solves among the new tokens:

    y_new = (I + β stril(Φ_new))⁻¹ β (v − Φ_past y_past)
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

import precondattn as pa
from precondattn.arrays import Arrays, Residuals, Tree
from precondattn.cache import Append, Updates
from precondattn.frame import Frame
from precondattn.spec.array_functions import identity_like, row_sum
from precondattn.spec.metric import DOT
from precondattn.spec.rms_norm import rms, rms_norm_vjp
from precondattn_jax.arithmetic import product, product_with_transposed, transposed_product, zeros
from precondattn_jax.definition import SteppingAsDefined
from precondattn_jax.layout import heads_first
from precondattn_jax.lucid_system import LucidSystem
from precondattn_jax.past import BufferedPast
from precondattn_portable.extension import new_tokens


class LucidSolveBlocks(SteppingAsDefined[pa.LucidSolve]):
    """Algorithm of the leaf `LucidSolve`."""

    name = "substitution in blocks"

    def forward(self, x: Arrays, frame: Frame) -> tuple[Array, Residuals]:
        return LucidSystem(self.leaf, x, frame).solved(), ()

    def output(self, x: Arrays, frame: Frame) -> Array:
        return LucidSystem(self.leaf, x, frame).differentiable()

    def backward(
        self, x: Arrays, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        leaf, system = self.leaf, LucidSystem(self.leaf, x, frame)
        blocks, scores = system.blocks, system.scores
        y, right = (blocks.of_keys(heads_first(a)) for a in (out, cotangent))

        def of_block(carry: tuple[Tree, Array], a: Array) -> tuple[Tree, Tree]:
            sums, right = carry
            rows = system.rows(a)
            within = rows.among()
            solved = transposed_product(rows.inverse(within), blocks.take(right, a)) / rows.diagonal
            d_v, v = rows.strength * solved, blocks.take(system.v, a)
            first = system.mask.first(a)
            trail = scores.trail(a, first)

            def scored(weights: Array, total: Array, j: Array) -> Array:
                """dS of a tile."""
                d_tile = -product_with_transposed(d_v, total) * weights
                if rows.maxima is None or leaf.detach_max:
                    return d_tile
                is_first = rows.maxima.first == blocks.columns(j)
                return d_tile + jnp.where(is_first, row_sum(d_v * v), 0.0)

            def pull(i: Array, carry: Tree) -> Tree:
                sums, right, d_rows, residual = carry
                j = first + i
                weights = rows.weights(scores.tile(scores.on_trail(trail, j), j), j)
                y_j = blocks.take(y, j)
                right = blocks.add(right, j, -transposed_product(weights, d_v))
                sums, d_rows = scores.pulled(sums, trail, d_rows, j, scored(weights, y_j, j))
                if leaf.beta:
                    residual = residual - product(weights, y_j)
                return sums, right, d_rows, residual

            d_rows = zeros(scores.q.shape[1:], scores.q)
            start = (sums, right, d_rows, v if leaf.beta else None)
            sums, right, d_rows, residual = lax.fori_loop(0, a - first, pull, start)
            y_a = blocks.take(y, a)
            d_within = scored(within, y_a, a)
            if not leaf.has_unit_diagonal:
                d_diagonal = row_sum(d_v * y_a) * rows.diagonal
                d_within = d_within - identity_like(d_within) * d_diagonal
            sums, d_rows = scores.pulled_diagonal(sums, a, d_rows, d_within)
            d_beta = row_sum(solved * (residual - product(within, y_a))) if leaf.beta else None
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

    def step(self, past: Arrays, x: Arrays, frame: Frame) -> tuple[Array, Updates]:
        if self.leaf.metric != DOT or not self.leaf.has_unit_diagonal:
            return super().step(past, x, frame)
        return self.with_derivative_of_the_definition(self._step)(past, x, frame)

    def _step(self, past: Arrays, x: Arrays, frame: Frame) -> tuple[Array, Updates]:
        """A step with the dot product and a unit diagonal."""
        leaf, (b, t, n, d) = self.leaf, x["k"].shape
        k, scale, updates = x["k"], leaf.scale_for(d), dict[str, Append](key=Append(x["k"]))
        if leaf.normalize == "keys":
            r = rms(k, leaf.eps)
            k, updates["rms"] = k / r, Append(r[..., 0])
        rows, key_frame = heads_first(k * scale), frame.among_keys(t)
        cached = BufferedPast(key_frame, past["key"].shape[1], b * n, leaf.window)

        def take(j: Array, right: Array) -> Array:
            tile = product_with_transposed(rows, cached.take(past["key"], j))
            if leaf.normalize == "keys":
                r = cached.take(past["rms"], j)[:, :, None, :]
                tile = tile / jnp.where(r > 0, r, 1.0)  # Empty slots, which are masked, hold 0.
            visible = cached.visible(j, key_frame.q_position)[:, :, 0]
            weights = jnp.where(visible, jnp.exp(tile - scale * d), 0.0)
            return right - product(weights, cached.take(past["solved"], j))

        right = heads_first(cached.over(take, heads_first(x["v"])))
        y = LucidSystem(leaf, {**x, "v": right}, new_tokens(frame, t)).solved()
        return y, {**updates, "solved": Append(y)}
