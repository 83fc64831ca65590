"""LASER's read of tiles, a log-mean-exp:  o_ic = log Σ_j e^{S_ij + v_jc} − log Σ_j e^{S_ij}.

Where all values of each channel are within R of each other, it is computed as a mean of e^{v − ν}:

    o = ν + log(A e^{v − ν}),    g = do ∘ e^{ν − o},    dv = e^{v − ν} ∘ (Aᵀ g).

Elsewhere every tile has its own shift, and tiles are merged by the largest exponent M, as in
`precondattn_portable.read_log_mean_exp`: by a product where the tile's values are close together,
and element by element otherwise. The choice is made at run time. Shifts are constant where JAX
differentiates, as in `read_mean.py`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from precondattn.arrays import dtype_name
from precondattn.spec.array_functions import finite_or_zero, row_sum
from precondattn.spec.laser import RANGE
from precondattn_jax.arithmetic import product, product_with_transposed, transposed_product, zeros
from precondattn_jax.loops import again
from precondattn_jax.read_mean import MeanRead, ReadRows

ELEMENTS = 16
"""Keys that are processed element by element at once."""


class LogState(NamedTuple):
    """The state of some rows after some tiles."""

    largest: Array
    """max S (…, rows, 1)"""
    total: Array
    """Σ e^{S − max S} (…, rows, 1)"""
    shift: Array
    """M (…, rows, e)"""
    sums: Array
    """Σ e^{S + v − M} (…, rows, e)"""


def is_narrow(v: Array) -> Array:
    """Whether all values of each channel (…, s, e) are within R of each other."""
    spread = jnp.max(jnp.max(v, axis=-2) - jnp.min(v, axis=-2))
    return spread <= RANGE[dtype_name(v)]


class LogMeanExpRead:
    """The log-mean-exp of the values (b, n, s, e); tiles as in `MeanRead`."""

    def start(self, shape: tuple[int, ...], v: Array) -> LogState:
        largest, total, _ = MeanRead().start(shape, v)
        return LogState(largest, total, zeros(shape, v) - math.inf, zeros(shape, v))

    def add(self, state: LogState, tile: Array, v: Array) -> LogState:
        mu = jnp.max(lax.stop_gradient(tile), axis=-1, keepdims=True)
        largest = jnp.maximum(state.largest, mu)
        base = finite_or_zero(largest)
        total = jnp.exp(state.largest - base) * state.total + row_sum(jnp.exp(tile - base))
        shift, part = lax.cond(is_narrow(v), _factored, _by_elements, tile, v)
        merged = jnp.maximum(state.shift, shift)
        base = finite_or_zero(merged)
        sums = state.sums * jnp.exp(state.shift - base) + part * jnp.exp(shift - base)
        return LogState(largest, total, merged, sums)

    def finish(self, state: LogState) -> tuple[Array, Array]:
        """The outputs and λ, both 0 without visible keys."""
        has_keys = state.total != 0
        total = jnp.where(has_keys, state.total, 1.0)
        log_total = jnp.where(has_keys, state.largest + jnp.log(total), 0.0)
        log_sum = finite_or_zero(state.shift) + jnp.log(jnp.where(has_keys, state.sums, 1.0))
        return jnp.where(has_keys, log_sum - log_total, 0.0), log_total

    def pull(self, tile: Array, v: Array, rows: ReadRows) -> tuple[Array, Array]:
        """dS, and its contribution to dv."""
        logs = tile - rows.log_total
        d_tile, d_v = lax.cond(is_narrow(v), _pull_factored, _pull_elements, logs, v, rows)
        return d_tile - row_sum(rows.d_o) * jnp.exp(logs), d_v


def _factored(tile: Array, v: Array) -> tuple[Array, Array]:
    """M and Σ e^{S + v − M} of a tile, M = max S + max v."""
    mu = jnp.max(lax.stop_gradient(tile), axis=-1, keepdims=True)
    nu = jnp.max(lax.stop_gradient(v), axis=-2, keepdims=True)
    return mu + nu, product(jnp.exp(tile - finite_or_zero(mu)), jnp.exp(v - nu))


def _pull_factored(logs: Array, v: Array, rows: ReadRows) -> tuple[Array, Array]:
    """Σ_c do w and Σ_i do w, w = e^{logs + v − o}, as products of p and g; |g| ≤ |do|, p ≤ e^R."""
    nu = jnp.max(v, axis=-2, keepdims=True)
    most = jnp.max(nu - rows.o, axis=-1, keepdims=True)
    limit = RANGE[dtype_name(v)] - finite_or_zero(jnp.max(logs, axis=-1, keepdims=True))
    alpha = jnp.minimum(jnp.maximum(most, 0.0), limit)
    p, w = jnp.exp(logs + alpha), jnp.exp(v - nu)
    # Only for a row without visible keys is the exponent above 0.
    g = rows.d_o * jnp.exp(jnp.minimum(nu - rows.o - alpha, 0.0))
    return p * product_with_transposed(g, w), w * transposed_product(p, g)


def _each(tile: Array, v: Array, i: Array, width: int) -> Array:
    """S_ij + v_jc of a piece (b, n, rows, width, e)."""
    scores = lax.dynamic_slice_in_dim(tile, i * width, width, 3)
    return scores[..., None] + lax.dynamic_slice_in_dim(v, i * width, width, 2)[:, :, None]


def _by_elements(tile: Array, v: Array) -> tuple[Array, Array]:
    width = math.gcd(tile.shape[-1], ELEMENTS)

    def add(i: Array, merged: tuple[Array, Array]) -> tuple[Array, Array]:
        before, total = merged
        each = _each(tile, v, i, width)
        shift = jnp.maximum(before, jnp.max(lax.stop_gradient(each), axis=3))
        base = finite_or_zero(shift)
        part = jnp.sum(jnp.exp(each - base[:, :, :, None]), axis=3)
        return shift, total * jnp.exp(before - base) + part

    shape = (*tile.shape[:3], v.shape[3])
    start = zeros(shape, tile) - math.inf, zeros(shape, tile)
    result: tuple[Array, Array] = lax.fori_loop(0, tile.shape[-1] // width, again(add), start)
    return result


def _pull_elements(logs: Array, v: Array, rows: ReadRows) -> tuple[Array, Array]:
    width = math.gcd(logs.shape[-1], ELEMENTS)

    def pull(i: Array, result: tuple[Array, Array]) -> tuple[Array, Array]:
        d_tile, d_v = result
        posterior = jnp.exp(_each(logs, v, i, width) - rows.o[:, :, :, None])
        weighted = rows.d_o[:, :, :, None] * posterior
        d_tile = lax.dynamic_update_slice_in_dim(d_tile, jnp.sum(weighted, -1), i * width, 3)
        return d_tile, lax.dynamic_update_slice_in_dim(d_v, jnp.sum(weighted, 2), i * width, 2)

    start = zeros(logs.shape, logs), zeros(v.shape, logs)
    d_tile, d_v = lax.fori_loop(0, logs.shape[-1] // width, pull, start)
    return d_tile, d_v
