"""A step of LUCID by one token: many programs together read every cached key and y once.

    [S; Φ] = [s q; s k̂] Kᵀ,    [a; r] = [e^{S − m}; Φ] Y               (`read_past`, by splits)
    y = β (v − r),    o = (a + e^{S_new − m} y) / (Σ e^{S − m} + e^{S_new − m})     (`finished`)

The rows of a tile are the query heads of a key/value head and the new key. A query's row has a
running maximum; the key's row needs none, since Φ ≤ 1. Products are in float32 (tf32 for half
precision, which represents bfloat16 and float16 exactly), because a step is limited by memory, not
by products. Exponents are in units of log 2. The splits are few and small, and XLA combines them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from precondattn.arrays import Array, Arrays
from precondattn_pallas.configurations import Configuration
from precondattn_pallas.launch import References, divide, launch, loop, remainder, shape_of
from precondattn_pallas.precision import Products


class SplitReads(NamedTuple):
    """The result of each split, for every row of a tile."""

    totals: Array
    """Σ e^{S − m} y, or Σ Φ y (m, splits, rows, e)"""
    maxima: Array
    """m (m, splits, rows)"""
    sums: Array
    """Σ e^{S − m} (m, splits, rows)"""


def read_past(
    x: References,
    out: References,
    *,
    products: Products,
    group: int,
    tokens: int,
    splits: int,
    shift: float,
) -> None:
    """One split of one key/value head."""
    rows, width = out["totals"].shape
    tiles = divide(x["count"][0] + (tokens - 1), tokens)
    per_split = divide(tiles + (splits - 1), splits)
    low = pl.program_id(0) * per_split
    row = lax.broadcasted_iota(jnp.int32, (rows,), 0)
    is_key = row == group
    queries = x["rows"][...]

    def add(index: Array, carried: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        largest, weight, total = carried
        j = pl.ds(index * tokens, tokens)
        seen = x["valid"][j] != 0
        keys = jnp.where(seen[:, None], x["keys"][j, :].astype(jnp.float32), 0.0)
        y = jnp.where(seen[:, None], x["solved"][j, :].astype(jnp.float32), 0.0)
        scores = products.dot(queries, keys, right=True)
        phi = scores
        if "rms" in x:
            rms = x["rms"][j]
            phi = scores / jnp.where(seen & (rms > 0), rms, 1.0)[None, :]
        logs = jnp.where(is_key[:, None], phi - shift, scores)
        logs = jnp.where(seen[None, :], logs, -jnp.inf)
        higher = jnp.where(is_key, 0.0, jnp.maximum(largest, jnp.max(logs, axis=1)))
        base = jnp.where(higher == -jnp.inf, 0.0, higher)
        weights = jnp.exp2(logs - base[:, None])
        kept = jnp.exp2(largest - base)
        total = total * kept[:, None] + products.dot(weights, y)
        return higher, weight * kept + jnp.sum(weights, axis=1), total

    start = (
        jnp.where(is_key, 0.0, -jnp.inf).astype(jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, width), jnp.float32),
    )
    largest, weight, total = loop(low, jnp.minimum(low + per_split, tiles), add, start)
    out["maxima"][...], out["sums"][...], out["totals"][...] = largest, weight, total


def read(
    rows: Array,
    past: Arrays,
    count: Array,
    configuration: Configuration,
    *,
    products: Products,
    group: int,
    shift: float,
    splits: int,
) -> SplitReads:
    """The splits' results for rows (m, rows, d): s q log₂ e and s k̂ log₂ e, in float32.

    `past` has keys (b, c, n, d), solved (b, c, n, e), valid (b, c) and optionally rms (b, c, n),
    all in whole tiles; the first `count` (b,) slots are read.
    """
    m, tile, d = rows.shape
    _, capacity, n, e = past["solved"].shape

    def of_buffer(array: Array) -> pl.BlockSpec:
        """The block of all slots of a head, or, without a head axis, of a sequence."""
        if array.ndim == 2:
            return pl.BlockSpec((None, capacity), lambda i, h: (divide(h, n), 0))
        if array.ndim == 3:
            return pl.BlockSpec(
                (None, capacity, None), lambda i, h: (divide(h, n), 0, remainder(h, n))
            )
        return pl.BlockSpec(
            (None, capacity, None, array.shape[3]),
            lambda i, h: (divide(h, n), 0, remainder(h, n), 0),
        )

    of_rows = pl.BlockSpec((None, None, tile), lambda i, h: (h, i, 0))
    result = launch(
        read_past,
        (splits, m),
        {
            "rows": (rows, pl.BlockSpec((None, tile, d), lambda i, h: (h, 0, 0))),
            "count": (count, pl.BlockSpec((1,), lambda i, h: (divide(h, n),))),
            **{name: (array, of_buffer(array)) for name, array in past.items()},
        },
        {
            "totals": (
                shape_of((m, splits, tile, e), jnp.float32),
                pl.BlockSpec((None, None, tile, e), lambda i, h: (h, i, 0, 0)),
            ),
            "maxima": (shape_of((m, splits, tile), jnp.float32), of_rows),
            "sums": (shape_of((m, splits, tile), jnp.float32), of_rows),
        },
        configuration,
        interpret=products.interpret,
        products=products,
        group=group,
        tokens=configuration.columns,
        splits=splits,
        shift=shift,
    )
    return SplitReads(**result)


def finished(
    result: SplitReads,
    queries: Array,
    key: Array,
    counts: Array,
    value: Array,
    beta: Array,
    group: int,
) -> tuple[Array, Array]:
    """o (m, group, e) and y (m, e), in float32; o is 0 without visible keys.

    queries (m, group, d), s q log₂ e; the new key (m, d), its validity (m), value (m, e) and β (m).
    """
    largest = jnp.max(result.maxima, axis=1)
    base = jnp.where(largest == -jnp.inf, 0.0, largest)
    weights = jnp.exp2(result.maxima - base[:, None])
    total = jnp.sum(result.totals * weights[..., None], axis=1)
    weight = jnp.sum(result.sums * weights, axis=1)
    y = beta[:, None] * (value - total[:, group])

    largest, weight = largest[:, :group], weight[:, :group]
    new_logits = jnp.where(counts[:, None], jnp.sum(queries * key[:, None], axis=2), -jnp.inf)
    higher = jnp.maximum(largest, new_logits)
    base = jnp.where(higher == -jnp.inf, 0.0, higher)
    kept, added = jnp.exp2(largest - base), jnp.exp2(new_logits - base)
    numerator = total[:, :group] * kept[..., None] + y[:, None] * added[..., None]
    weight = weight * kept + added
    return numerator / jnp.where(weight > 0, weight, 1.0)[..., None], y
