"""Softmax attention forward, in tiles, with the logarithm of each row's sum for the gradient.

    S = s q kᵀ,  P = e^{S − m},    l ← l e^{m − m'} + rowsum(P),    acc ← acc e^{m − m'} + P v,
    o = acc / l,    λ = m + log l,

with the running maximum m of each row. A program owns a tile of queries of one head and iterates
over the tiles of keys it attends to; nothing is t × s. Exponents and λ are in units of log 2. A row
without visible keys has o = 0 and λ = ∞: all of its weights are 0.

2 t s (d + e) FLOPs per head, half of them with causality; k and v are read once for every tile of
queries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from precondattn_pallas.configurations import Configuration
from precondattn_pallas.launch import divide, launch, loop, shape_of, whole
from precondattn_pallas.precision import Products
from precondattn_pallas.softmax.score_tiles import (
    Segments,
    StaticMask,
    met_by_queries,
    padded,
    padded_runs,
    visible,
)


class Tiling(NamedTuple):
    """Sizes of one launch of a kernel, and its products."""

    mask: StaticMask
    scale: float
    """s log₂ e"""
    products: Products
    tile: Configuration
    d: int
    """Padded, like e."""
    e: int
    rounds: bool
    """Whether dS is rounded to the dtype of queries and keys before products with them."""

    def times(self, d_scores: Any, rows: Any) -> Any:
        """dS K, or dSᵀ Q."""
        factor = rows.dtype if self.rounds else jnp.float32
        return self.products.dot(d_scores.astype(factor), rows.astype(factor))


def forward(x: Any, out: Any, *, tiling: Tiling) -> None:
    rows, columns = tiling.tile[:2]
    q = x["q"][...]
    row = pl.program_id(0) * rows + lax.broadcasted_iota(jnp.int32, (rows, columns), 0)
    offset = lax.broadcasted_iota(jnp.int32, (rows, columns), 1)

    def add(index: Any, carried: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        largest, total, acc = carried
        j = pl.ds(index * columns, columns)
        scores = tiling.products.dot(q, x["k"][j, :], right=True) * tiling.scale
        runs = (None, None)
        if "k_run" in x:
            runs = x["q_run"][...][:, None], x["k_run"][j][None, :]
        is_visible = visible(tiling.mask, row, index * columns + offset, *runs)
        scores = jnp.where(is_visible, scores, -jnp.inf)
        higher = jnp.maximum(largest, jnp.max(scores, axis=1))
        base = jnp.where(higher == -jnp.inf, 0.0, higher)
        shrink = jnp.exp2(largest - base)
        v = x["v"][j, :]
        # Sum the rounded weights that multiply v, so that acc / l is a mean.
        p = jnp.exp2(scores - base[:, None]).astype(v.dtype)
        total = total * shrink + jnp.sum(p.astype(jnp.float32), axis=1)
        return higher, total, acc * shrink[:, None] + tiling.products.dot(p, v)

    start = (
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, tiling.e), jnp.float32),
    )
    largest, total, acc = loop(x["low"][0], x["high"][0], add, start)
    some = jnp.where(total > 0, total, 1.0)
    out["o"][...] = acc / some[:, None]
    out["log_total"][...] = jnp.where(total > 0, largest + jnp.log2(some), jnp.inf)


def attend(tiling: Tiling, q: Any, k: Any, v: Any, segments: Segments | None) -> tuple[Any, Any]:
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


def of_each(array: Any) -> pl.BlockSpec:
    """One number for each tile and sequence, or the same for all sequences: (b or 1, tiles)."""
    if array.shape[0] == 1:
        return pl.BlockSpec((None, 1), lambda i, h, b: (0, i))
    return pl.BlockSpec((None, 1), lambda i, h, b: (b, i))
