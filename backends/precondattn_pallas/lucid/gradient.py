"""The gradient of LUCID's keys, in one pass over all pairs of tiles.

    dk̂_a = −s Σ_b Φ_ab g_ab k̂_b,    g_ab = dv_a · y_b  (b before a),  dv_b · y_a  (b behind a),

which goes through the norm outside. Every program owns a tile of keys and goes over all others, on
both sides of it: nothing is added to from two programs, and the result is the same every time.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from precondattn_pallas.configurations import Configuration
from precondattn_pallas.launch import divide, launch, loop, shape_of, whole
from precondattn_pallas.lucid.tiles import Phi, of_tile


def key_gradient(x: Any, out: Any, *, phi: Phi, columns: int, chunk: int, count: int) -> None:
    """A tile of Σ_b Φ_ab g_ab k̂_b, from all keys, y and dv of its head.

    Products with g are not of 16 bits: it has no bound for float16, and where keys coincide the
    sum cancels, so that bfloat16 has too few digits.
    """
    rows = out["d_keys"].shape[0]
    a_start = pl.program_id(0) * rows
    own = pl.ds(a_start, rows)
    keys, a_segments = x["keys"], of_tile(x, "segments", own)
    a = a_start + lax.broadcasted_iota(jnp.int32, (rows, columns), 0)
    place = lax.broadcasted_iota(jnp.int32, (rows, columns), 1)

    def side(left: str, right: str, *, before: bool) -> Any:
        def add(index: Any, total: Any) -> Any:
            b_start = index * columns
            other = pl.ds(b_start, columns)
            g = jnp.zeros((rows, columns), jnp.float32)
            for first in range(0, x[left].shape[1], chunk):
                channels = pl.ds(first, chunk)
                g += phi.products.dot(x[left][own, channels], x[right][other, channels], right=True)
            b = b_start + place
            g = jnp.where(b < a if before else b > a, g, 0.0)
            weights = phi.tile(keys, own, keys, other, a_segments, of_tile(x, "segments", other))
            return total + phi.products.dot(g * weights, keys[other, :].astype(jnp.float32))

        return add

    # The tiles that cross the diagonal come in both loops, each time with one side of it.
    total = jnp.zeros(out["d_keys"].shape, jnp.float32)
    end = divide(a_start + rows + columns - 1, columns)
    total = loop(0, end, side("d_v", "y", before=True), total)
    behind = divide(a_start, columns)
    total = loop(behind, whole(count, columns), side("y", "d_v", before=False), total)
    out["d_keys"][...] = total


def d_keys(
    phi: Phi,
    keys: Any,
    segments: Any,
    y: Any,
    d_v: Any,
    cut: Configuration,
    *,
    count: int,
    chunk: int,
) -> Any:
    """Σ_b Φ_ab g_ab k̂_b (m, T, d) in float32; keys (m, T, d), y and dv (m, T, e).

    `count` of the T tokens count for something; `chunk` channels are multiplied at once.
    """
    m, tokens, d = keys.shape

    def all_of(array: Any) -> Any:
        rest = array.shape[2:]
        by = m // array.shape[0]
        zeros = (0,) * (1 + len(rest))
        return array, pl.BlockSpec((None, tokens, *rest), lambda i, h: (divide(h, by), *zeros))

    given = {"keys": keys, "y": y, "d_v": d_v}
    if segments is not None:
        given["segments"] = segments
    found = launch(
        key_gradient,
        (whole(tokens, cut.rows), m),
        {name: all_of(array) for name, array in given.items()},
        {
            "d_keys": (
                shape_of((m, tokens, d), jnp.float32),
                pl.BlockSpec((None, cut.rows, d), lambda i, h: (h, i, 0)),
            )
        },
        cut,
        interpret=phi.products.interpret,
        phi=phi,
        columns=cut.columns,
        chunk=chunk,
        count=count,
    )
    return found["d_keys"]
