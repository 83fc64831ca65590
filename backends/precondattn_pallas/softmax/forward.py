"""Softmax attention forward (flash attention), with each row's log-sum-exp λ for the gradient.

    S = s q kᵀ,    o = softmax(S) v,    λ = log rowsum(e^S),

by online softmax: a running maximum m, a sum l and a weighted sum for each row,

    P = e^{S − m},    l ← l e^{m − m'} + rowsum(P),    acc ← acc e^{m − m'} + P v,
    o = acc / l,      λ = m + log l.

Exponents and λ are in units of log 2. A row without visible keys has o = 0 and λ = ∞: all of its
weights are 0. A program has a tile of queries of one head and iterates over the tiles of keys it
attends to; no array is t × s.

2 t s (d + e) FLOPs per head, half of them with causality; k and v are read once for every tile of
queries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from precondattn.arrays import Array, Arrays
from precondattn_pallas.configurations import Configuration
from precondattn_pallas.launch import References, divide, launch, loop, shape_of, whole
from precondattn_pallas.precision import Products
from precondattn_pallas.softmax.score_tiles import (
    SegmentRuns,
    StaticMask,
    met_by_keys,
    met_by_queries,
    padded,
    padded_runs,
    visible,
)


class SoftmaxTiling(NamedTuple):
    """Sizes of one launch of a kernel, and its products."""

    mask: StaticMask
    scale: float
    """s log₂ e"""
    products: Products
    tile: Configuration
    d: int
    """Key channels, padded, as e is"""
    e: int
    rounds: bool
    """Whether dS is rounded to the dtype of queries and keys before products with them."""

    def times(self, d_scores: Array, rows: Array) -> Array:
        """dS K, or dSᵀ Q."""
        factor = rows.dtype if self.rounds else jnp.float32
        return self.products.dot(d_scores.astype(factor), rows.astype(factor))


Running = tuple[Array, Array, Array]
"""m (rows), l (rows) and acc (rows, e), in float32."""


def empty(rows: int, e: int) -> Running:
    """m, l and acc before the first tile."""
    return (
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, e), jnp.float32),
    )


def with_tile(carried: Running, scores: Array, v: Array, products: Products) -> Running:
    """m, l and acc after a tile: scores (rows, columns), −∞ if masked, and values (columns, e)."""
    largest, total, acc = carried
    higher = jnp.maximum(largest, jnp.max(scores, axis=1))
    base = jnp.where(higher == -jnp.inf, 0.0, higher)
    shrink = jnp.exp2(largest - base)
    # Sum the rounded weights that multiply v, so that acc / l is a mean.
    p = jnp.exp2(scores - base[:, None]).astype(v.dtype)
    total = total * shrink + jnp.sum(p.astype(jnp.float32), axis=1)
    return higher, total, acc * shrink[:, None] + products.dot(p, v)


def mean_and_log(carried: Running) -> tuple[Array, Array]:
    """o (rows, e) and λ (rows)."""
    largest, total, acc = carried
    some = jnp.where(total > 0, total, 1.0)
    return acc / some[:, None], jnp.where(total > 0, largest + jnp.log2(some), jnp.inf)


def forward(x: References, out: References, *, tiling: SoftmaxTiling) -> None:
    rows, columns = tiling.tile[:2]
    q = x["q"][...]
    row = pl.program_id(0) * rows + lax.broadcasted_iota(jnp.int32, (rows, columns), 0)
    offset = lax.broadcasted_iota(jnp.int32, (rows, columns), 1)

    def add(index: Array, carried: Running) -> Running:
        j = pl.ds(index * columns, columns)
        scores = tiling.products.dot(q, x["k"][j, :], right=True) * tiling.scale
        runs = (None, None)
        if "k_run" in x:
            runs = x["q_run"][...][:, None], x["k_run"][j][None, :]
        is_visible = visible(tiling.mask, row, index * columns + offset, *runs)
        scores = jnp.where(is_visible, scores, -jnp.inf)
        return with_tile(carried, scores, x["v"][j, :], tiling.products)

    out["o"][...], out["log_total"][...] = mean_and_log(
        loop(x["low"][0], x["high"][0], add, empty(rows, tiling.e))
    )


def attend(
    tiling: SoftmaxTiling, q: Array, k: Array, v: Array, segments: SegmentRuns | None
) -> tuple[Array, Array]:
    """o (b, t, h, e) and λ (b, h, t), in float32."""
    x, outputs = {"q": q, "k": k, "v": v}, {"o": tiling.e, "log_total": None}
    result = launch_tiles(forward, tiling, x, segments, outputs)
    t, e = q.shape[1], v.shape[3]
    return result["o"][:, :t, :, :e], result["log_total"][:, :, :t]


def launch_tiles(
    kernel: Callable[..., None],
    tiling: SoftmaxTiling,
    x: Mapping[str, Array],
    segments: SegmentRuns | None,
    outputs: Mapping[str, int | None],
    *,
    by_keys: bool = False,
) -> Arrays:
    """Launches a kernel whose programs own tiles of queries, or of keys.

    x has q, k, v and d_o as (b, tokens, heads, channels), log_total and d_sum as (b, h, t). An
    output has tokens (padded) of the owners, and a width, or one number for each.
    """
    rows, columns = tiling.tile[:2]
    (b, t, h, _), (s, n) = x["q"].shape, x["k"].shape[1:3]
    group = h // n
    (owned, heads), other = ((s, n), t) if by_keys else ((t, h), s)
    tiles, others = whole(owned, rows), whole(other, columns) * columns
    owned = tiles * rows
    t_padded, s_padded = (others, owned) if by_keys else (owned, others)
    met = met_by_keys if by_keys else met_by_queries
    low, high = met(tiling.mask, segments, rows, columns)

    def of_tile(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, rows, None, width), lambda i, h, b: (b, i, h, 0))

    def of_others(width: int) -> pl.BlockSpec:
        if by_keys:
            return pl.BlockSpec((None, others, group, width), lambda j, n, b: (b, 0, n, 0))
        return pl.BlockSpec(
            (None, others, None, width), lambda i, h, b: (b, 0, divide(h, group), 0)
        )

    of_queries, of_keys = (of_others, of_tile) if by_keys else (of_tile, of_others)
    of_rows = pl.BlockSpec((None, None, rows), lambda i, h, b: (b, h, i))
    if by_keys:
        of_rows = pl.BlockSpec((None, group, others), lambda j, n, b: (b, n, 0))
    inputs = {}
    for name, array in x.items():
        width = tiling.d if name in ("q", "k") else tiling.e
        if name in ("q", "d_o"):
            inputs[name] = padded(array, t_padded, width), of_queries(width)
        elif name in ("k", "v"):
            inputs[name] = padded(array, s_padded, width), of_keys(width)
        else:
            # All weights of a row with λ = ∞ are 0.
            filler = jnp.inf if name == "log_total" else 0.0
            missing = ((0, 0), (0, 0), (0, t_padded - t))
            inputs[name] = jnp.pad(array, missing, constant_values=filler), of_rows
    inputs["low"], inputs["high"] = (low, of_each(low)), (high, of_each(high))
    if segments is not None:
        row_spec = pl.BlockSpec((None, rows), lambda i, h, b: (b, i))
        other_spec = pl.BlockSpec((None, others), lambda i, h, b: (b, 0))
        q_spec, k_spec = (other_spec, row_spec) if by_keys else (row_spec, other_spec)
        inputs["q_run"] = padded_runs(segments.q_run, t_padded, -2), q_spec
        inputs["k_run"] = padded_runs(segments.key, s_padded, -1), k_spec
    return launch(
        kernel,
        (tiles, heads, b),
        inputs,
        {
            name: (shape_of((b, heads, owned), jnp.float32), of_rows)
            if width is None
            else (shape_of((b, owned, heads, width), jnp.float32), of_tile(width))
            for name, width in outputs.items()
        },
        tiling.tile,
        interpret=tiling.products.interpret,
        tiling=tiling,
    )


def of_each(array: Array) -> pl.BlockSpec:
    """One number for each tile and sequence, or the same for all sequences: (b or 1, tiles)."""
    if array.shape[0] == 1:
        return pl.BlockSpec((None, 1), lambda i, h, b: (0, i))
    return pl.BlockSpec((None, 1), lambda i, h, b: (b, i))
