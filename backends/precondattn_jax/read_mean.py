"""Reading tiles by mean:  o = Σ_j e^{S_ij} v_j / Σ_j e^{S_ij}, summed tile by tile.

    m' = max(m, max_J S),    l ← e^{m − m'} l + Σ_J e^{S − m'},    a ← e^{m − m'} a + e^{S − m'} v_J

and finally o = a / l. With the residual λ = m + log l, the gradient is

    A = e^{S − λ},    dv_J = Aᵀ do,    dS = A ∘ (do v_Jᵀ − rowsum(do ∘ o)).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from precondattn.spec.array_functions import finite_or_zero, row_sum
from precondattn_jax.arithmetic import (
    full,
    product,
    product_with_transposed,
    transposed_product,
    zeros,
)


class MeanState(NamedTuple):
    """The state of some rows after some tiles."""

    largest: Array
    """m (…, rows, 1)"""
    total: Array
    """l (…, rows, 1)"""
    sums: Array
    """a (…, rows, e)"""


class Rows(NamedTuple):
    """Arrays of some rows that the gradient needs, each (b, n, rows, …)."""

    log_total: Array
    o: Array
    d_o: Array


class MeanRead:
    """Tiles of scores (b, n, rows, columns) with values (b, n, columns, e)."""

    def start(self, shape: tuple[int, ...], v: Array) -> MeanState:
        """The state before the first tile; `shape` is that of the output's rows."""
        column = (*shape[:-1], 1)
        return MeanState(full(column, -math.inf, v), zeros(column, v), zeros(shape, v))

    def add(self, state: MeanState, tile: Array, v: Array) -> MeanState:
        largest = jnp.maximum(state.largest, jnp.max(tile, axis=-1, keepdims=True))
        base = finite_or_zero(largest)
        weights, kept = jnp.exp(tile - base), jnp.exp(state.largest - base)
        total = kept * state.total + row_sum(weights)
        return MeanState(largest, total, kept * state.sums + product(weights, v))

    def finish(self, state: MeanState) -> tuple[Array, Array]:
        """The outputs and λ, both 0 without visible keys."""
        some = state.total > 0
        total = jnp.where(some, state.total, 1.0)
        return state.sums / total, jnp.where(some, state.largest + jnp.log(total), 0.0)

    def pull(self, tile: Array, v: Array, rows: Rows) -> tuple[Array, Array]:
        """dS, and its contribution to dv."""
        weights = jnp.exp(tile - rows.log_total)
        d_weights = product_with_transposed(rows.d_o, v) - row_sum(rows.d_o * rows.o)
        return weights * d_weights, transposed_product(weights, rows.d_o)
