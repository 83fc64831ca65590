"""Online softmax (flash attention):  o = Σ_j e^{S_ij} v_j / Σ_j e^{S_ij}, summed tile by tile.

    m' = max(m, max_J S),    l ← e^{m − m'} l + Σ_J e^{S − m'},    a ← e^{m − m'} a + e^{S − m'} v_J

and finally o = a / l. A sink σ (`softmax.py`) is the state before the first tile: m = σ, l = 1.
The result does not depend on m, which is therefore constant where JAX differentiates the sums.
With the residual λ = m + log l, the gradient is

    A = e^{S − λ},    dv_J = Aᵀ do,    dS = A ∘ (do v_Jᵀ − rowsum(do ∘ o)).

`MeanAndLogSumRead` writes λ to the last channel of the output, and adds its cotangent to dS / A.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from precondattn.spec.array_functions import finite_or_zero, row_sum
from precondattn.spec.read import MEAN, MEAN_AND_LOG_SUM
from precondattn_jax.arithmetic import product, product_with_transposed, transposed_product, zeros


class MeanState(NamedTuple):
    """The state of some rows after some tiles."""

    largest: Array
    """m (…, rows, 1)"""
    total: Array
    """l (…, rows, 1)"""
    sums: Array
    """a (…, rows, e)"""


class ReadRows(NamedTuple):
    """Arrays of some rows that the gradient needs, each (b, n, rows, …)."""

    log_total: Array
    o: Array
    d_o: Array


class MeanRead:
    """Tiles of scores (b, n, rows, columns) with values (b, n, columns, e), and sinks (h,)."""

    def __init__(self, sink: Array | None = None) -> None:
        self.sink = sink

    def start(self, shape: tuple[int, ...], v: Array) -> MeanState:
        """The state before the first tile; `shape` is that of the output's rows."""
        column = (*shape[:-1], 1)
        nothing = zeros(column, v)
        if self.sink is not None:
            _, n, rows, _ = column
            groups = jnp.reshape(self.sink, (1, n, -1, 1))
            sink = jnp.repeat(groups, rows // groups.shape[2], axis=2)
            largest = lax.stop_gradient(sink)
            return MeanState(nothing + largest, nothing + jnp.exp(sink - largest), zeros(shape, v))
        return MeanState(nothing - math.inf, nothing, zeros(shape, v))

    def add(self, state: MeanState, tile: Array, v: Array) -> MeanState:
        row_max = jnp.max(lax.stop_gradient(tile), axis=-1, keepdims=True)
        largest = jnp.maximum(state.largest, row_max)
        base = finite_or_zero(largest)
        weights, kept = jnp.exp(tile - base), jnp.exp(state.largest - base)
        total = kept * state.total + row_sum(weights)
        return MeanState(largest, total, kept * state.sums + product(weights, v))

    def finish(self, state: MeanState) -> tuple[Array, Array]:
        """The outputs and λ, both 0 without visible keys."""
        has_keys = state.total != 0
        total = jnp.where(has_keys, state.total, 1.0)
        return state.sums / total, jnp.where(has_keys, state.largest + jnp.log(total), 0.0)

    def pull(self, tile: Array, v: Array, rows: ReadRows) -> tuple[Array, Array]:
        """dS, and its contribution to dv."""
        return _pulled(tile, v, rows.log_total, rows.d_o, MEAN.d_log_total(rows.o, rows.d_o))


class MeanAndLogSumRead(MeanRead):
    """The mean, and λ in the last channel of the output; the last channel of v is not read."""

    def start(self, shape: tuple[int, ...], v: Array) -> MeanState:
        return super().start((*shape[:-1], shape[-1] - 1), v)

    def add(self, state: MeanState, tile: Array, v: Array) -> MeanState:
        return super().add(state, tile, v[..., :-1])

    def finish(self, state: MeanState) -> tuple[Array, Array]:
        mean, log_total = super().finish(state)
        last = jnp.where(state.total != 0, log_total, -math.inf)
        return jnp.concatenate([mean, last], axis=-1), log_total

    def pull(self, tile: Array, v: Array, rows: ReadRows) -> tuple[Array, Array]:
        d_log_total = MEAN_AND_LOG_SUM.d_log_total(rows.o, rows.d_o)
        d_mean = rows.d_o[..., :-1]
        d_tile, d_v = _pulled(tile, v[..., :-1], rows.log_total, d_mean, d_log_total)
        return d_tile, jnp.concatenate([d_v, jnp.zeros_like(d_v[..., :1])], axis=-1)


def _pulled(
    tile: Array, v: Array, log_total: Array, d_o: Array, d_log_total: Array
) -> tuple[Array, Array]:
    weights = jnp.exp(tile - log_total)
    d_weights = product_with_transposed(d_o, v) + d_log_total
    return weights * d_weights, transposed_product(weights, d_o)
