"""Softmax attention forward (flash attention), with each row's log-sum-exp λ for the gradient.

    S = s q kᵀ,    o = softmax(S) v,    λ = log rowsum(e^S),

by online softmax (`running.py`). A program has a tile of queries of one head and iterates over the
tiles of keys it attends to; no array is t × s.

2 t s (d + e) FLOPs per head, half of them with causality; k and v are read once for every tile of
queries.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from precondattn.arrays import Array
from precondattn_pallas.configurations import Configuration
from precondattn_pallas.launch import References, divide, launch, loop, shape_of, whole
from precondattn_pallas.precision import Products
from precondattn_pallas.softmax.running import Running, empty, mean_and_log, with_tile
from precondattn_pallas.softmax.score_tiles import (
    SegmentRuns,
    StaticMask,
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
        return self.products.dot_of_gradient(d_scores, rows, rounds=self.rounds)


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
    rows, columns = tiling.tile[:2]
    (b, t, h, _), (_, s, n, e) = q.shape, v.shape
    group = h // n
    t_tiles, s_padded = whole(t, rows), whole(s, columns) * columns
    low, high = met_by_queries(tiling.mask, segments, rows, columns)

    def of_tile(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, rows, None, width), lambda i, h, b: (b, i, h, 0))

    def of_keys(width: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, s_padded, None, width), lambda i, h, b: (b, 0, divide(h, group), 0)
        )

    inputs = {
        "q": (padded(q, t_tiles * rows, tiling.d), of_tile(tiling.d)),
        "k": (padded(k, s_padded, tiling.d), of_keys(tiling.d)),
        "v": (padded(v, s_padded, tiling.e), of_keys(tiling.e)),
        "low": (low, of_each(low)),
        "high": (high, of_each(high)),
    }
    if segments is not None:
        row_spec = pl.BlockSpec((None, rows), lambda i, h, b: (b, i))
        other = pl.BlockSpec((None, s_padded), lambda i, h, b: (b, 0))
        inputs["q_run"] = (padded_runs(segments.q_run, t_tiles * rows, -2), row_spec)
        inputs["k_run"] = (padded_runs(segments.key, s_padded, -1), other)
    result = launch(
        forward,
        (t_tiles, h, b),
        inputs,
        {
            "o": (shape_of((b, t_tiles * rows, h, tiling.e), jnp.float32), of_tile(tiling.e)),
            "log_total": (
                shape_of((b, h, t_tiles * rows), jnp.float32),
                pl.BlockSpec((None, None, rows), lambda i, h, b: (b, h, i)),
            ),
        },
        tiling.tile,
        interpret=tiling.products.interpret,
        tiling=tiling,
    )
    return result["o"][:, :t, :, :e], result["log_total"][:, :, :t]


def of_each(array: Array) -> pl.BlockSpec:
    """One number for each tile and sequence, or the same for all sequences: (b or 1, tiles)."""
    if array.shape[0] == 1:
        return pl.BlockSpec((None, 1), lambda i, h, b: (0, i))
    return pl.BlockSpec((None, 1), lambda i, h, b: (b, i))
