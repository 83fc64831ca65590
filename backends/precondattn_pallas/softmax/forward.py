"""Softmax attention forward, in tiles, with the logarithm of each row's sum for the gradient.

    S = s q kᵀ,  P = e^{S − m},    l ← l e^{m − m'} + rowsum(P),    acc ← acc e^{m − m'} + P v,
    o = acc / l,    λ = m + log l,

with the running maximum m of each row. A program owns a tile of queries of one head and goes over
the tiles of keys that it meets; nothing is t × s. Exponents are in units of log 2, and so is λ. A
row that sees nothing has o = 0 and λ = ∞: all of its weights vanish.

2 t s (d + e) FLOPs a head, half of them where causal; k and v are read once for every tile of
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
    Sight,
    filled,
    filled_runs,
    met_by_queries,
    visible,
)


class Cut(NamedTuple):
    """Sizes of one call of a kernel, and how it multiplies."""

    sight: Sight
    scale: float
    """s log₂ e"""
    products: Products
    tile: Configuration
    d: int
    """Padded, as e."""
    e: int


def forward(x: Any, out: Any, *, cut: Cut) -> None:
    rows, columns = cut.tile[:2]
    q = x["q"][...]
    row = pl.program_id(0) * rows + lax.broadcasted_iota(jnp.int32, (rows, columns), 0)
    place = lax.broadcasted_iota(jnp.int32, (rows, columns), 1)

    def add(index: Any, carried: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        largest, total, acc = carried
        j = pl.ds(index * columns, columns)
        scores = cut.products.dot(q, x["k"][j, :], right=True) * cut.scale
        runs = (None, None)
        if "k_run" in x:
            runs = x["q_run"][...][:, None], x["k_run"][j][None, :]
        seen = visible(cut.sight, row, index * columns + place, *runs)
        scores = jnp.where(seen, scores, -jnp.inf)
        higher = jnp.maximum(largest, jnp.max(scores, axis=1))
        base = jnp.where(higher == -jnp.inf, 0.0, higher)
        shrink = jnp.exp2(largest - base)
        v = x["v"][j, :]
        # The sum is of what is multiplied, so that acc / l is a mean.
        p = jnp.exp2(scores - base[:, None]).astype(v.dtype)
        total = total * shrink + jnp.sum(p.astype(jnp.float32), axis=1)
        return higher, total, acc * shrink[:, None] + cut.products.dot(p, v)

    start = (
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, cut.e), jnp.float32),
    )
    largest, total, acc = loop(x["low"][0], x["high"][0], add, start)
    some = jnp.where(total > 0, total, 1.0)
    out["o"][...] = acc / some[:, None]
    out["log_total"][...] = jnp.where(total > 0, largest + jnp.log2(some), jnp.inf)


def attend(cut: Cut, q: Any, k: Any, v: Any, segments: Segments | None) -> tuple[Any, Any]:
    """o (b, t, h, e) and λ (b, h, t), in float32."""
    rows, columns = cut.tile[:2]
    (b, t, h, _), (_, s, n, e) = q.shape, v.shape
    group = h // n
    t_tiles, s_filled = whole(t, rows), whole(s, columns) * columns
    low, high = met_by_queries(cut.sight, segments, rows, columns)

    def of_tile(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, rows, None, width), lambda i, h, b: (b, i, h, 0))

    def of_keys(width: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, s_filled, None, width), lambda i, h, b: (b, 0, divide(h, group), 0)
        )

    inputs = {
        "q": (filled(q, t_tiles * rows, cut.d), of_tile(cut.d)),
        "k": (filled(k, s_filled, cut.d), of_keys(cut.d)),
        "v": (filled(v, s_filled, cut.e), of_keys(cut.e)),
        "low": (low, of_each(low)),
        "high": (high, of_each(high)),
    }
    if segments is not None:
        own = pl.BlockSpec((None, rows), lambda i, h, b: (b, i))
        other = pl.BlockSpec((None, s_filled), lambda i, h, b: (b, 0))
        inputs["q_run"] = (filled_runs(segments.q_run, t_tiles * rows, -2), own)
        inputs["k_run"] = (filled_runs(segments.key, s_filled, -1), other)
    found = launch(
        forward,
        (t_tiles, h, b),
        inputs,
        {
            "o": (shape_of((b, t_tiles * rows, h, cut.e), jnp.float32), of_tile(cut.e)),
            "log_total": (
                shape_of((b, h, t_tiles * rows), jnp.float32),
                pl.BlockSpec((None, None, rows), lambda i, h, b: (b, h, i)),
            ),
        },
        cut.tile,
        interpret=cut.products.interpret,
        cut=cut,
    )
    return found["o"][:, :t, :, :e], found["log_total"][:, :, :t]


def of_each(array: Any) -> pl.BlockSpec:
    """One number for each tile and sequence, or the same for all sequences: (b or 1, tiles)."""
    if array.shape[0] == 1:
        return pl.BlockSpec((None, 1), lambda i, h, b: (0, i))
    return pl.BlockSpec((None, 1), lambda i, h, b: (b, i))
