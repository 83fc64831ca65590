"""LUCID's solve, which JAX can differentiate any number of times (`lower_system.py`)."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array, lax

import precondattn as pa
from precondattn.frame import Frame
from precondattn.spec.array_functions import row_sum
from precondattn_jax.layout import heads_first
from precondattn_jax.loops import DIFFERENTIABLE
from precondattn_jax.lower_system import joined, solved
from precondattn_jax.lucid_system import LucidSystem, Shift


class LucidRows:
    """LUCID's system, with shifts that are constant."""

    def __init__(self, system: LucidSystem, shifts: Array | float) -> None:
        self.system, self.shifts = system, shifts
        self.blocks, self.mask = system.blocks, system.mask
        self.start, self.carried = system.scores.start, system.scores.carried

    def _shift(self, a: Array) -> Shift:
        value = self.shifts if isinstance(self.shifts, float) else self.shifts[a]
        return Shift(value, None, None)

    def preceding(self, x: Array, a: Array, j: Array) -> Array:
        return self.system.weights(self.system.scores.tile(x, j), self._shift(a), a, j)

    def among(self, a: Array) -> Array:
        tile = self.system.scores.diagonal(a)
        return self.system.weights(tile, self._shift(a), a, a, diagonal=True)

    def strength(self, a: Array) -> Array | float:
        beta = self.system.beta
        return 1.0 if beta is None else self.blocks.take(beta, a)

    def diagonal(self, a: Array) -> Array | float:
        if self.system.leaf.has_unit_diagonal:
            return 1.0
        own = self.system.own_scores(a) - self._shift(a).value
        return jnp.exp(self.system.at_tokens(a, own))

    def score_at(self, a: Array, column: Array) -> Array:
        """The score of each row of block a with the key at `column` (b, n, C, 1)."""
        scores, size = self.system.scores, self.blocks.size

        def part(tile: Array, j: Array) -> Array:
            here = column == j * size + jnp.arange(size)
            return row_sum(jnp.where(here, tile, 0.0))

        def add(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            total, x = carry
            j = a - 1 - i
            return total + part(scores.tile(x, j), j), scores.carried(x, j)

        start = (part(scores.diagonal(a), a), scores.start(a))
        return DIFFERENTIABLE.counted(self.blocks.keys, a - self.mask.first(a), add, start)[0]


def output(leaf: pa.LucidSolve, x: Mapping[str, Array], frame: Frame) -> Array:
    """y (b, s, n, e)"""
    system = LucidSystem(leaf, x, frame)
    constant = LucidSystem(leaf, lax.stop_gradient(dict(x)), frame)
    blocks, right = system.blocks, system.v if system.beta is None else system.beta * system.v
    shifts: Array | float = 0.0
    if leaf.has_unit_diagonal:
        shifts = float(system.scale * system.k.shape[3])
    elif leaf.normalize == "rows":
        shifts, firsts = lax.map(lambda a: constant.shift(a)[::2], blocks.rows)
    rows = LucidRows(system, shifts)
    if leaf.normalize == "rows" and not leaf.detach_max:
        # A row is divided by the exponential of its maximum, which has a derivative. To multiply
        # the right-hand side by it is the same.
        maxima = DIFFERENTIABLE.each(lambda a: rows.score_at(a, firsts[a]), blocks.rows)
        right = right * jnp.exp(joined(maxima - lax.stop_gradient(maxima)))
    y = solved(rows, LucidRows(constant, shifts), right)
    return heads_first(y[:, :, : blocks.s])
