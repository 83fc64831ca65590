"""LUCID's triangular system, one tile of Φ at a time, without storing its matrix.

    E y = diag(β) v,    E = diag(δ) + diag(β) stril(Φ),    Φ_ij = e^{s ⟨k̂_i, k̂_j⟩ − shift_i}

where δ = 1 in the normalised forms, and Φ's diagonal otherwise. With β' = β / δ and blocks I, one
after the other,

    y_I = (I + β'_I stril(Φ_II))⁻¹ β'_I (v_I − Σ_{J<I} Φ_IJ y_J),

where the diagonal block is inverted by products (`triangular_inverse.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

import precondattn as pa
from precondattn.frame import Frame
from precondattn.spec.array_functions import row_sum
from precondattn.spec.metric import DOT
from precondattn.spec.rms_norm import rms
from precondattn_jax.arithmetic import full, product, zeros
from precondattn_jax.dot_scores import DotScores
from precondattn_jax.layout import REFLECTIONS, QueryBlocks, block_size, heads_first
from precondattn_jax.masks import Mask
from precondattn_jax.transported_scores import TransportedScores
from precondattn_jax.triangular_inverse import unit_lower_inverse


class Shift(NamedTuple):
    """The shift of the scores of a block's rows, and what depends on it."""

    value: Array | float
    """(b, n, C, 1) or a number"""
    diagonal: Array | None
    """δ (b, n, C, 1); None where it is 1"""
    first: Array | None
    """The first key that attains the row maximum (b, n, C, 1)"""


class LucidSystem:
    """The system of a full call of `LucidSolve`."""

    def __init__(self, leaf: pa.LucidSolve, x: Mapping[str, Array], frame: Frame) -> None:
        self.leaf, self.x = leaf, x
        b, s, n, d = x["k"].shape
        most = None if leaf.metric == DOT else REFLECTIONS
        size = block_size(s, b * n, most, packed=frame.k_segment is not None)
        self.blocks = blocks = QueryBlocks(s, s, size)
        self.scale = leaf.scale_for(d)
        self.k = self._of_keys("k")
        unit = self.k / rms(self.k, leaf.eps) if leaf.normalize == "keys" else self.k
        self.v = self._of_keys("v")
        queries = blocks.stacked((unit * self.scale)[:, :, None, :s])
        self.scores: DotScores
        if leaf.metric == DOT:
            self.scores = DotScores(blocks, queries, unit)
        else:
            self.scores = TransportedScores(
                blocks, queries, unit, self._of_keys("w"), self._of_keys("beta")
            )
        self.beta: Array | None = None
        """β (b, n, s, 1), 0 at padding; None where it is 1"""
        if leaf.beta:
            self.beta = self._of_keys("lucid_beta")[..., None]
        if frame.k_valid is not None:
            one = full((*self.k.shape[:3], 1), 1.0, self.k) if self.beta is None else self.beta
            valid = blocks.of_keys(frame.k_valid, axis=1)
            self.beta = jnp.where(valid[:, None, :, None], one, 0.0)
        frame = frame.among_keys(s)
        # Padding has β = 0. Its scores could enter only a maximum.
        keys = frame.k_valid if leaf.normalize == "rows" else None
        frame = frame.replaced(q_valid=None, k_valid=keys)
        self.mask = Mask(frame, blocks, window=leaf.window, strict=True)

    def _of_keys(self, name: str) -> Array:
        return self.blocks.of_keys(heads_first(self.x[name]))

    def shift(self, a: Array) -> Shift:
        """The shift of the rows of block a."""
        leaf = self.leaf
        if leaf.has_unit_diagonal:
            return Shift(self.scale * self.k.shape[3], None, None)
        own = self.own_scores(a)
        value: Array | float = 0.0
        first: Array | None = None
        if leaf.normalize == "rows":
            value, first = self._row_maxima(a, own)
        return Shift(value, jnp.exp(self.at_tokens(a, own - value)), first)

    def own_scores(self, a: Array) -> Array:
        """S_ii of the rows of block a (b, n, C, 1)."""
        keys = self.blocks.take(self.scores.k, a)
        return row_sum(keys * keys) * self.scale

    def at_tokens(self, a: Array, x: Array) -> Array:
        """x of the rows of block a, 0 at padding; β is not an input, but 1 or, at padding, 0."""
        return x if self.beta is None else jnp.where(self.blocks.take(self.beta, a) > 0, x, 0.0)

    def _row_maxima(self, a: Array, diagonal: Array) -> tuple[Array, Array]:
        """m_i = max_{j≤i} of the scores (b, n, C, 1), and the first j that attains it."""
        size = self.blocks.size

        def merged(best: Array, position: Array, tile: Array, j: Array) -> tuple[Array, Array]:
            row_max = jnp.max(tile, axis=-1, keepdims=True)
            first = j * size + jnp.argmax(tile, axis=-1, keepdims=True).astype(position.dtype)
            is_past = row_max >= best  # Blocks are processed from the last to the first.
            return jnp.where(is_past, row_max, best), jnp.where(is_past, first, position)

        position = a * size + jnp.arange(size)[:, None]
        position = (zeros(diagonal.shape, diagonal) + position).astype(a.dtype)
        tile = self.mask.apply(self.scores.diagonal(a), a, a, diagonal=True)
        best = merged(diagonal, position, tile, a)

        def add(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            best, position, x = carry
            j = a - 1 - i
            tile = self.mask.apply(self.scores.tile(x, j), a, j)
            return *merged(best, position, tile, j), self.scores.carried(x, j)

        count = a - self.mask.first(a)
        best, position, _ = lax.fori_loop(0, count, add, (*best, self.scores.start(a)))
        return best, position

    def weights(
        self, tile: Array, shift: Shift, a: Array, j: Array, *, diagonal: bool = False
    ) -> Array:
        """Φ of a tile (b, n, C, C), 0 at masked pairs."""
        return self.mask.apply(jnp.exp(tile - shift.value), a, j, diagonal=diagonal, otherwise=0.0)

    def diagonal(self, a: Array, shift: Shift) -> tuple[Array, Array]:
        """stril(Φ_aa), and (I + β' stril(Φ_aa))⁻¹."""
        within = self.weights(self.scores.diagonal(a), shift, a, a, diagonal=True)
        return within, unit_lower_inverse(self.times_beta(within, a, shift))

    def times_beta(self, x: Array, a: Array, shift: Shift) -> Array:
        """β' x for the rows of block a."""
        if self.beta is not None:
            x = self.blocks.take(self.beta, a) * x
        return x if shift.diagonal is None else x / shift.diagonal

    def solved(self) -> Array:
        """y (b, s, n, e)"""
        blocks, scores = self.blocks, self.scores

        def of_block(y: Array, a: Array) -> tuple[Array, None]:
            shift = self.shift(a)

            def take(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
                right, x = carry
                j = a - 1 - i
                weights = self.weights(scores.tile(x, j), shift, a, j)
                return right - product(weights, blocks.take(y, j)), scores.carried(x, j)

            count = a - self.mask.first(a)
            start = (blocks.take(self.v, a), scores.start(a))
            right, _ = lax.fori_loop(0, count, take, start)
            _, inverse = self.diagonal(a, shift)
            return blocks.put(y, a, product(inverse, self.times_beta(right, a, shift))), None

        y, _ = lax.scan(of_block, zeros(self.v.shape, self.v), blocks.rows)
        return heads_first(y[:, :, : blocks.s])
