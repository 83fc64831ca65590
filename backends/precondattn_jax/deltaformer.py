"""DeltaFormer, one tile of its map at a time (the equations are in `precondattn_portable`).

    u_I = (I + β_I P_II)⁻¹ (v_I − β_I Σ_{J<I} P_IJ u_J),    o = a w + (1 − a) u,    w = P u,

with the running maximum and sum of a row over its tiles, and a = 1 / (1 + e^{S_tt − λ}). Backward,
from the last block to the first, with c = a do − β x:

    (I + β_I P_II)ᵀ x_I = R_I + (1 − a_I) do_I + P_IIᵀ (a_I do_I),    R_J += P_IJᵀ c_I,
    dS = P ∘ (c uᵀ − a (do·o) + β (x·w)).
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array, lax

import precondattn as pa
from precondattn.arrays import Arrays, Residuals, Tree
from precondattn.frame import Frame
from precondattn.spec.array_functions import finite_or_zero, repeat_heads, row_sum, sum_heads
from precondattn_jax.arithmetic import product, product_with_transposed, transposed_product, zeros
from precondattn_jax.definition import SteppingAsDefined
from precondattn_jax.dot_scores import DotScores
from precondattn_jax.layout import BlockedCall, heads_first, joined
from precondattn_jax.loops import DIFFERENTIABLE
from precondattn_jax.lower_system import LowerRows, products, solved
from precondattn_jax.masks import Mask
from precondattn_jax.read_mean import MeanRead, MeanState
from precondattn_jax.triangular_inverse import unit_lower_inverse
from precondattn_portable import deltaformer


class Tiles(BlockedCall[pa.DeltaFormer]):
    """A full call in blocks; arrays have h heads before time."""

    log_totals: Array
    """λ (b, h, s, 1), where the system is that of `rows`"""

    def __init__(self, leaf: pa.DeltaFormer, x: Arrays, frame: Frame) -> None:
        super().__init__(leaf, x, frame)
        blocks, self.scale = self.blocks, leaf.scale_for(self.d)
        q = heads_first(x["q"]) * self.scale
        k, self.v, self.beta = (self.of_keys(name) for name in ("k", "v", "beta"))
        self.beta = self.beta[..., None]
        self.mask = Mask(frame.among_keys(blocks.s), blocks, strict=True, of_queries=True)
        self.scores = DotScores(blocks, blocks.stacked(q[:, :, None]), k)
        self.own_scores = row_sum(blocks.of_keys(q) * k)
        """S_tt (b, h, s, 1), −∞ if key t is masked"""
        valid = self.mask.k_valid
        if valid is not None:
            self.own_scores = jnp.where(valid[:, None, :, None], self.own_scores, -math.inf)

    def of_keys(self, name: str) -> Array:
        return repeat_heads(super().of_keys(name), self.n * self.r)

    def masked(self, a: Array, j: Array, *, diagonal: bool = False) -> Array:
        """S of a tile, −∞ at masked pairs."""
        tile = self.scores.tile(self.scores.start(a), j)
        return self.mask.apply(tile, a, j, diagonal=diagonal)

    def own_weight(self, a: Array, log_total: Array) -> Array:
        """1 − a of the rows of a block, from λ."""
        own_score = self.blocks.take(self.own_scores, a)
        has_keys = own_score > -math.inf
        gap = jnp.where(has_keys, own_score, 0.0) - jnp.where(has_keys, log_total, 0.0)
        return jnp.where(has_keys, 0.5 + 0.5 * jnp.tanh(0.5 * gap), 0.0)

    def rows(self, a: Array) -> MapRows:
        return MapRows(self, a)

    def differentiable(self) -> Array:
        """o (b, s, h, e), which JAX can differentiate: (I + β P) u = v,  o = a P u + (1 − a) u."""
        blocks, mean_read = self.blocks, MeanRead()

        def log_totals_of(a: Array) -> tuple[Array, Array]:
            """λ, 0 without keys, and whether there are keys."""
            values = blocks.take(self.beta, a)  # Any array of width 1: only weights are summed.

            def add(state: MeanState, tile: Array, j: Array) -> MeanState:
                return mean_read.add(state, self.mask.apply(tile, a, j), values)

            state = mean_read.start(values.shape, values)
            state = mean_read.add(state, self.masked(a, a, diagonal=True), values)
            first = self.mask.first(a)
            state = self.scores.over(a, first, a, add, state, DIFFERENTIABLE)
            return mean_read.finish(state)[1], state.total > 0

        self.log_totals, has_keys = map(joined, DIFFERENTIABLE.each(log_totals_of, blocks.rows))
        constant = Tiles(self.leaf, lax.stop_gradient(self.x), self.frame)
        constant.log_totals = lax.stop_gradient(self.log_totals)
        u = solved(self, constant, self.v)
        log_totals = jnp.where(has_keys, self.log_totals, -jnp.inf)
        own_weights = joined(
            lax.map(lambda a: self.own_weight(a, blocks.take(log_totals, a)), blocks.rows)
        )
        return self.tokens((1.0 - own_weights) * products(self, u) + own_weights * u)


class MapRows(LowerRows):
    """Rows of the system of u: W is the strict softmax P = e^{S − λ}."""

    def __init__(self, tiles: Tiles, a: Array) -> None:
        super().__init__(tiles.scores, tiles.mask, a)
        self.strength = tiles.blocks.take(tiles.beta, a)
        self.tiles = tiles

    def weights(self, tile: Array, j: Array, *, diagonal: bool = False) -> Array:
        log_total = self.tiles.blocks.take(self.tiles.log_totals, self.a)
        return jnp.exp(self.mask.apply(tile, self.a, j, diagonal=diagonal) - log_total)


class DeltaFormerBlocks(SteppingAsDefined[pa.DeltaFormer], deltaformer.DeltaFormerBlocks):
    """Algorithm of the leaf `DeltaFormer`."""

    def forward(self, x: Arrays, frame: Frame) -> tuple[Array, Residuals]:
        tiles = Tiles(self.leaf, x, frame)
        blocks, v = tiles.blocks, tiles.v

        def of_block(u: Array, a: Array) -> tuple[Array, tuple[Array, Array, Array]]:
            tile = tiles.masked(a, a, diagonal=True)
            largest = jnp.max(tile, axis=-1, keepdims=True)

            def add(j: Array, state: MeanState) -> MeanState:
                return MeanRead().add(state, tiles.masked(a, j), blocks.take(u, j))

            nothing = (zeros(largest.shape, v), zeros(blocks.take(v, a).shape, v))
            start = MeanState(largest, *nothing)
            largest, total, of_earlier = lax.fori_loop(tiles.mask.first(a), a, add, start)
            shift = finite_or_zero(largest)
            weights = jnp.exp(tile - shift)
            total = total + row_sum(weights)
            has_keys = total > 0
            total = jnp.where(has_keys, total, 1.0)
            log_total = jnp.where(has_keys, shift + jnp.log(total), -math.inf)
            of_earlier, weights = of_earlier / total, weights / total
            beta = blocks.take(tiles.beta, a)
            inverse = unit_lower_inverse(beta * weights)
            solved = product(inverse, blocks.take(v, a) - beta * of_earlier)
            weighted = of_earlier + product(weights, solved)
            own_weight = tiles.own_weight(a, log_total)
            rows = ((1.0 - own_weight) * weighted + own_weight * solved, weighted, log_total)
            return blocks.put(u, a, solved), rows

        _, rows = lax.scan(of_block, zeros(v.shape, v), blocks.rows)
        o, w, log_total = (tiles.tokens(joined(stack)) for stack in rows)
        return o, (w, log_total[..., 0])

    def output(self, x: Arrays, frame: Frame) -> Array:
        return Tiles(self.leaf, x, frame).differentiable()

    def backward(
        self, x: Arrays, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        tiles = Tiles(self.leaf, x, frame)
        blocks, k = tiles.blocks, tiles.scores.k

        def of_tokens(array: Array, value: float = 0.0) -> Array:
            if frame.k_valid is not None:
                array = jnp.where(frame.k_valid[:, :, None, None], array, value)
            return blocks.of_keys(heads_first(array), value=value)

        # No token reads u of a padded token.
        w, o, d_o = (of_tokens(array) for array in (residuals[0], out, cotangent))
        log_totals = of_tokens(residuals[1][..., None], -math.inf)
        u = tiles.v - tiles.beta * w

        def of_block(carry: tuple[Array, Array], a: Array) -> Tree:
            log_total = blocks.take(log_totals, a)
            shift = finite_or_zero(log_total)
            own_weight, beta = tiles.own_weight(a, log_total), blocks.take(tiles.beta, a)
            d_rows, keys, queries = blocks.take(d_o, a), blocks.take(k, a), tiles.scores.start(a)
            diagonal_weights = jnp.exp(tiles.masked(a, a, diagonal=True) - shift)
            d_weighted = (1.0 - own_weight) * d_rows
            right = (
                blocks.take(carry[0], a)
                + own_weight * d_rows
                + transposed_product(diagonal_weights, d_weighted)
            )
            solved = transposed_product(unit_lower_inverse(beta * diagonal_weights), right)
            d_strength = -row_sum(solved * blocks.take(w, a))
            combined = d_weighted - beta * solved
            mean = row_sum(d_rows * blocks.take(o, a))
            constant = (1.0 - own_weight) * mean + beta * d_strength
            d_own = own_weight * (row_sum(d_rows * blocks.take(u, a)) - mean)

            def scored(weights: Array, j: Array) -> Array:
                """dS of a tile."""
                return weights * (product_with_transposed(combined, blocks.take(u, j)) - constant)

            def pull(j: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                d_u, d_k, d_queries = sums
                weights = jnp.exp(tiles.masked(a, j) - shift)
                d_scores = scored(weights, j)
                d_u = blocks.add(d_u, j, transposed_product(weights, combined))
                d_k = blocks.add(d_k, j, transposed_product(d_scores, queries))
                return d_u, d_k, d_queries + product(d_scores, blocks.take(k, j))

            d_scores = scored(diagonal_weights, a)
            d_k = blocks.add(carry[1], a, transposed_product(d_scores, queries) + d_own * queries)
            start = (carry[0], d_k, product(d_scores, keys) + d_own * keys)
            d_u, d_k, d_queries = lax.fori_loop(tiles.mask.first(a), a, pull, start)
            return (d_u, d_k), (d_queries, solved, d_strength)

        start = (zeros(u.shape, u), zeros(k.shape, u))
        (_, d_k), rows = lax.scan(of_block, start, blocks.rows, reverse=True)
        d_q, d_v, d_beta = (joined(stack) for stack in rows)
        n = x["k"].shape[2]
        return {
            "q": tiles.tokens(d_q * tiles.scale),
            "k": tiles.tokens(sum_heads(d_k, n)),
            "v": tiles.tokens(sum_heads(d_v, n)),
            "beta": tiles.tokens(d_beta[..., 0]),
        }
