"""DeltaFormer, one tile of its map at a time (the equations are in `precondattn_portable`).

    u_I = (I + β_I P_II)⁻¹ (v_I − β_I Σ_{J<I} P_IJ u_J),    o = a w + (1 − a) u,    w = P u,

with the running maximum and sum of a row over its tiles, and a = 1 / (1 + e^{S_tt − λ}). Backward,
from the last block to the first, with c = a do − β x:

    (I + β_I P_II)ᵀ x_I = R_I + (1 − a_I) do_I + P_IIᵀ (a_I do_I),    R_J += P_IJᵀ c_I,
    dS = P ∘ (c uᵀ − a (do·o) + β (x·w)).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array, lax

import precondattn as pa
from precondattn.arrays import Arrays, Residuals, Tree
from precondattn.backend import ArraySpec
from precondattn.cache import Updates
from precondattn.frame import Frame
from precondattn.spec.array_functions import finite_or_zero, repeat_heads, row_sum, sum_heads
from precondattn_jax.arithmetic import (
    product,
    product_with_transposed,
    transposed_product,
    zeros,
)
from precondattn_jax.definition import step_as_defined
from precondattn_jax.layout import QueryBlocks, block_size, heads_first
from precondattn_jax.masks import Mask
from precondattn_jax.triangular_inverse import unit_lower_inverse
from precondattn_portable.algorithm import Algorithm


class Tiles:
    """A full call in blocks; arrays have h heads before time."""

    def __init__(self, leaf: pa.DeltaFormer, x: Mapping[str, Array], frame: Frame) -> None:
        b, s, h, d = x["q"].shape
        size = block_size(s, b * h, packed=frame.k_segment is not None)
        self.blocks = blocks = QueryBlocks(s, s, size)
        self.mask = Mask(frame.among_keys(s), blocks, strict=True, of_queries=True)
        self.scale = leaf.scale_for(d)

        def of_tokens(name: str) -> Array:
            return blocks.of_keys(repeat_heads(heads_first(x[name]), h))

        self.q = of_tokens("q") * self.scale
        self.k, self.v = of_tokens("k"), of_tokens("v")
        self.beta = of_tokens("beta")[..., None]
        self.own = row_sum(self.q * self.k)
        """S_tt (b, h, s, 1), −∞ where the token's own key is masked"""
        valid = self.mask.k_valid
        if valid is not None:
            self.own = jnp.where(valid[:, None, :, None], self.own, -math.inf)

    def scores(self, a: Array, j: Array, *, diagonal: bool = False) -> Array:
        tile = product_with_transposed(self.blocks.take(self.q, a), self.blocks.take(self.k, j))
        return self.mask.apply(tile, a, j, diagonal=diagonal)

    def own_weight(self, a: Array, log_total: Array) -> Array:
        """1 − a of the rows of a block, from λ."""
        own = self.blocks.take(self.own, a)
        some = own > -math.inf
        gap = jnp.where(some, own, 0.0) - jnp.where(some, log_total, 0.0)
        return jnp.where(some, 0.5 + 0.5 * jnp.tanh(0.5 * gap), 0.0)

    def tokens(self, x: Array) -> Array:
        """(b, h, s, …) without padding, as (b, s, h, …)."""
        return heads_first(x[:, :, : self.blocks.s])


class DeltaFormerBlocks(Algorithm[pa.DeltaFormer]):
    """Algorithm of the leaf `DeltaFormer`."""

    name = "substitution in blocks"

    def forward(self, x: Arrays, frame: Frame) -> tuple[Array, Residuals]:
        tiles = Tiles(self.leaf, x, frame)
        blocks, v = tiles.blocks, tiles.v

        def of_block(u: Array, a: Array) -> tuple[Array, tuple[Array, Array, Array]]:
            tile = tiles.scores(a, a, diagonal=True)
            largest = jnp.max(tile, axis=-1, keepdims=True)

            def add(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                largest, total, read = carry
                tile = tiles.scores(a, j)
                new = jnp.maximum(largest, jnp.max(tile, axis=-1, keepdims=True))
                shift = finite_or_zero(new)
                kept, weights = jnp.exp(largest - shift), jnp.exp(tile - shift)
                read = kept * read + product(weights, blocks.take(u, j))
                return new, kept * total + row_sum(weights), read

            start = (largest, zeros(largest.shape, v), zeros(blocks.take(v, a).shape, v))
            largest, total, known = lax.fori_loop(tiles.mask.first(a), a, add, start)
            shift = finite_or_zero(largest)
            among = jnp.exp(tile - shift)
            total = total + row_sum(among)
            some = total > 0
            total = jnp.where(some, total, 1.0)
            log_total = jnp.where(some, shift + jnp.log(total), -math.inf)
            known, among = known / total, among / total
            beta = blocks.take(tiles.beta, a)
            inverse = unit_lower_inverse(beta * among)
            solved = product(inverse, blocks.take(v, a) - beta * known)
            read = known + product(among, solved)
            own = tiles.own_weight(a, log_total)
            rows = ((1.0 - own) * read + own * solved, read, log_total)
            return blocks.put(u, a, solved), rows

        _, rows = lax.scan(of_block, zeros(v.shape, v), blocks.rows)
        o, w, log_total = (tiles.tokens(_joined(stack)) for stack in rows)
        return o, (w, log_total[..., 0])

    def backward(
        self, x: Arrays, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        tiles = Tiles(self.leaf, x, frame)
        blocks = tiles.blocks

        def of_tokens(array: Array, value: float = 0.0) -> Array:
            if frame.k_valid is not None:
                array = jnp.where(frame.k_valid[:, :, None, None], array, value)
            return blocks.of_keys(heads_first(array), value=value)

        # u of a padded token is read by none.
        w, o, d_o = (of_tokens(array) for array in (residuals[0], out, cotangent))
        log_totals = of_tokens(residuals[1][..., None], -math.inf)
        u = tiles.v - tiles.beta * w

        def of_block(carry: tuple[Array, Array], a: Array) -> Tree:
            log_total = blocks.take(log_totals, a)
            shift = finite_or_zero(log_total)
            own, beta = tiles.own_weight(a, log_total), blocks.take(tiles.beta, a)
            d_rows, queries, keys = (blocks.take(z, a) for z in (d_o, tiles.q, tiles.k))
            among = jnp.exp(tiles.scores(a, a, diagonal=True) - shift)
            read = (1.0 - own) * d_rows
            right = blocks.take(carry[0], a) + own * d_rows + transposed_product(among, read)
            solved = transposed_product(unit_lower_inverse(beta * among), right)
            d_strength = -row_sum(solved * blocks.take(w, a))
            combined = read - beta * solved
            mean = row_sum(d_rows * blocks.take(o, a))
            constant = (1.0 - own) * mean + beta * d_strength
            d_own = own * (row_sum(d_rows * blocks.take(u, a)) - mean)

            def scored(weights: Array, j: Array) -> Array:
                """dS of a tile."""
                return weights * (product_with_transposed(combined, blocks.take(u, j)) - constant)

            def pull(j: Array, given: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                d_u, d_k, d_queries = given
                weights = jnp.exp(tiles.scores(a, j) - shift)
                d_scores = scored(weights, j)
                d_u = blocks.add(d_u, j, transposed_product(weights, combined))
                d_k = blocks.add(d_k, j, transposed_product(d_scores, queries))
                return d_u, d_k, d_queries + product(d_scores, blocks.take(tiles.k, j))

            d_scores = scored(among, a)
            d_k = blocks.add(carry[1], a, transposed_product(d_scores, queries) + d_own * queries)
            start = (carry[0], d_k, product(d_scores, keys) + d_own * keys)
            d_u, d_k, d_queries = lax.fori_loop(tiles.mask.first(a), a, pull, start)
            return (d_u, d_k), (d_queries, solved, d_strength)

        start = (zeros(u.shape, u), zeros(tiles.k.shape, u))
        (_, d_k), rows = lax.scan(of_block, start, blocks.rows, reverse=True)
        d_q, d_v, d_beta = (_joined(stack) for stack in rows)
        n = x["k"].shape[2]
        return {
            "q": tiles.tokens(d_q * tiles.scale),
            "k": tiles.tokens(sum_heads(d_k, n)),
            "v": tiles.tokens(sum_heads(d_v, n)),
            "beta": tiles.tokens(d_beta[..., 0]),
        }

    def step(self, past: Arrays, x: Arrays, frame: Frame) -> tuple[Array, Updates]:
        return step_as_defined(self.leaf, past, x, frame)

    def residual_shapes(self, inputs: Mapping[str, ArraySpec]) -> tuple[ArraySpec, ...]:
        (b, s, h, _), dtype = inputs["q"]
        dtype = dtype if dtype == "float64" else "float32"
        width = inputs["v"].shape[3]
        return (ArraySpec((b, s, h, width), dtype), ArraySpec((b, s, h), dtype))


def _joined(stack: Array) -> Array:
    """(blocks, b, h, C, c) as (b, h, s, c)."""
    count, b, h, size, c = stack.shape
    return jnp.reshape(jnp.moveaxis(stack, 0, 2), (b, h, count * size, c))
