"""LUCID's triangular system, one tile of Φ at a time, without storing its matrix.

    E y = diag(β) v,    E = diag(δ) + diag(β) stril(Φ),    Φ_ij = e^{s ⟨k̂_i, k̂_j⟩ − shift_i}

where δ = 1 in the normalised forms, and Φ's diagonal otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

import precondattn as pa
from precondattn.arrays import Arrays
from precondattn.frame import Frame
from precondattn.spec.array_functions import row_sum
from precondattn.spec.metric import DOT
from precondattn.spec.rms_norm import rms
from precondattn_jax.arithmetic import zeros
from precondattn_jax.layout import REFLECTIONS, BlockedCall, joined
from precondattn_jax.loops import DIFFERENTIABLE
from precondattn_jax.lower_system import LowerRows, solved, substituted
from precondattn_jax.masks import Mask
from precondattn_jax.transported_scores import scores_of


class RowMaxima(NamedTuple):
    """Row maxima of the scores, for some rows or for the rows of each block."""

    value: Array
    """m_i = max_{j≤i} of the scores (b, n, C, 1)"""
    first: Array
    """The first j that attains it"""


class LucidSystem(BlockedCall[pa.LucidSolve]):
    """The system of a full call of `LucidSolve`."""

    maxima: RowMaxima | None = None
    """The row maxima of each block, if they are known already"""

    def __init__(self, leaf: pa.LucidSolve, x: Arrays, frame: Frame) -> None:
        most = None if leaf.metric == DOT else REFLECTIONS
        super().__init__(leaf, x, frame, queries="k", most=most)
        blocks, self.scale = self.blocks, leaf.scale_for(self.d)
        self.k, self.v = self.of_keys("k"), self.of_keys("v")
        unit = self.k / rms(self.k, leaf.eps) if leaf.normalize == "keys" else self.k
        queries = blocks.stacked((unit * self.scale)[:, :, None, : blocks.s])
        self.scores = scores_of(self, queries, unit)
        self.beta: Array | None = None
        """β (b, n, s, 1), 0 at padding; None where it is 1"""
        if leaf.beta:
            self.beta = self.of_keys("lucid_beta")[..., None]
        if frame.k_valid is not None:
            one = zeros((*self.k.shape[:3], 1), self.k) + 1.0 if self.beta is None else self.beta
            valid = blocks.of_keys(frame.k_valid, axis=1)
            self.beta = jnp.where(valid[:, None, :, None], one, 0.0)
        frame = frame.among_keys(blocks.s)
        # Padding has β = 0. Its scores can matter only for a row maximum.
        keys = frame.k_valid if leaf.normalize == "rows" else None
        frame = frame.replaced(q_valid=None, k_valid=keys)
        self.mask = Mask(frame, blocks, window=leaf.window, strict=True)

    def rows(self, a: Array) -> LucidRows:
        return LucidRows(self, a)

    def solved(self) -> Array:
        """y (b, s, n, e)"""
        right = self.v if self.beta is None else self.beta * self.v
        return self.tokens(substituted(self, right))

    def differentiable(self) -> Array:
        """y (b, s, n, e), which JAX can differentiate any number of times."""
        leaf, rows = self.leaf, self.blocks.rows
        constant = LucidSystem(leaf, lax.stop_gradient(self.x), self.frame)
        right = self.v if self.beta is None else self.beta * self.v
        if leaf.normalize == "rows":
            maxima = lax.map(lambda a: constant.rows(a).maxima, rows)
            self.maxima = constant.maxima = maxima
            if not leaf.detach_max:
                # A row is divided by the exponential of its maximum, which has a derivative.
                # Multiplying the right-hand side by it is equivalent.
                scores = DIFFERENTIABLE.each(lambda a: self.rows(a).score_at(maxima.first[a]), rows)
                right = right * jnp.exp(joined(scores - lax.stop_gradient(scores)))
        return self.tokens(solved(self, constant, right))


class LucidRows(LowerRows):
    """The rows of block a: W is Φ."""

    shift: Array | float = 0.0
    """(b, n, C, 1) or a number"""
    maxima: RowMaxima | None = None

    def __init__(self, system: LucidSystem, a: Array) -> None:
        super().__init__(system.scores, system.mask, a)
        blocks, leaf = system.blocks, system.leaf
        if system.beta is not None:
            self.strength = blocks.take(system.beta, a)
        if leaf.has_unit_diagonal:
            self.shift = system.scale * system.d
            return
        keys = blocks.take(self.scores.k, a)
        own_scores = row_sum(keys * keys) * system.scale
        if leaf.normalize == "rows":
            maxima = system.maxima
            self.maxima = (
                self._maxima(own_scores) if maxima is None else RowMaxima(*(x[a] for x in maxima))
            )
            self.shift = self.maxima.value
        shifted = own_scores - self.shift
        if system.beta is not None:  # β is 0 at padding, whose diagonal then has to be 1.
            shifted = jnp.where(self.strength > 0, shifted, 0.0)
        self.diagonal = jnp.exp(shifted)

    def weights(self, tile: Array, j: Array, *, diagonal: bool = False) -> Array:
        weights = jnp.exp(tile - self.shift)
        return self.mask.apply(weights, self.a, j, diagonal=diagonal, otherwise=0.0)

    def _maxima(self, own: Array) -> RowMaxima:
        """The row maxima of the scores; `own` is the diagonal S_ii."""
        a, blocks = self.a, self.scores.blocks

        def add(so_far: RowMaxima, tile: Array, j: Array, *, diagonal: bool = False) -> RowMaxima:
            tile = self.mask.apply(tile, a, j, diagonal=diagonal)
            row_max = jnp.max(tile, axis=-1, keepdims=True)
            first = j * blocks.size + jnp.argmax(tile, axis=-1, keepdims=True).astype(a.dtype)
            is_past = row_max >= so_far.value  # Blocks are processed from the last to the first.
            each = zip((row_max, first), so_far, strict=True)
            return RowMaxima(*(jnp.where(is_past, new, old) for new, old in each))

        position = jnp.matrix_transpose(blocks.columns(a)).astype(own.dtype)
        so_far = RowMaxima(own, (zeros(own.shape, own) + position).astype(a.dtype))
        so_far = add(so_far, self.scores.diagonal(a), a, diagonal=True)
        result: RowMaxima = self.scores.over(a, self.mask.first(a), a, add, so_far)
        return result

    def score_at(self, column: Array) -> Array:
        """The score of each row with the key at `column` (b, n, C, 1)."""
        a, blocks = self.a, self.scores.blocks

        def add(total: Array | float, tile: Array, j: Array) -> Array:
            return total + row_sum(jnp.where(column == blocks.columns(j), tile, 0.0))

        own_sum = add(0.0, self.scores.diagonal(a), a)
        return self.scores.over(a, self.mask.first(a), a, add, own_sum, DIFFERENTIABLE)
