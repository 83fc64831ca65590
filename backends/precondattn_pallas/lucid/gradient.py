"""The gradient of LUCID's keys, in one pass over all pairs of tiles.

    dk̂_a = −s Σ_b Φ_ab g_ab k̂_b,    g_ab = dv_a · y_b  (b before a),  dv_b · y_a  (b after a),

which is propagated through the norm by XLA. Every program owns a tile of keys and iterates over all
others of the same segments, before and after it. No two programs add to the same element, so the
result is deterministic.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from precondattn.arrays import Array
from precondattn_pallas.configurations import Configuration
from precondattn_pallas.launch import References, divide, launch, loop, shape_of, whole
from precondattn_pallas.lucid.tiles import Phi, SolveInputs, of_head, of_tile, reach


def key_gradient(
    x: References, out: References, *, phi: Phi, columns: int, chunk: int, count: int
) -> None:
    """A tile of Σ_b Φ_ab g_ab k̂_b, from all keys, y and dv of its head.

    Products with g do not use 16 bits: g may exceed float16's range, and where keys are nearly
    equal the sum cancels, for which bfloat16 has too few digits.
    """
    rows = out["d_keys"].shape[0]
    a_start = pl.program_id(0) * rows
    own_rows = pl.ds(a_start, rows)
    keys, a_segments = x["keys"], of_tile(x, "segments", own_rows)
    a = a_start + lax.broadcasted_iota(jnp.int32, (rows, columns), 0)
    offset = lax.broadcasted_iota(jnp.int32, (rows, columns), 1)

    def side(left: str, right: str, *, before: bool) -> Array:
        def add(index: Array, total: Array) -> Array:
            b_start = index * columns
            other = pl.ds(b_start, columns)
            g = jnp.zeros((rows, columns), jnp.float32)
            for first in range(0, x[left].shape[1], chunk):
                channels = pl.ds(first, chunk)
                g += phi.products.dot(
                    x[left][own_rows, channels], x[right][other, channels], right=True
                )
            b = b_start + offset
            g = jnp.where(b < a if before else b > a, g, 0.0)
            weights = phi.tile(
                keys, own_rows, keys, other, a_segments, of_tile(x, "segments", other)
            )
            return total + phi.products.dot(g * weights, keys[other, :].astype(jnp.float32))

        return add

    # Tiles that cross the diagonal are in both loops, each time with one side of it masked.
    total = jnp.zeros(out["d_keys"].shape, jnp.float32)
    first, last = jnp.int32(0), jnp.int32(whole(count, columns))
    if "segments" in x:
        begin, end = reach(x, a_start, rows)
        first = divide(begin, columns)
        last = jnp.minimum(last, divide(end + (columns - 1), columns))
    end_before = divide(a_start + rows + columns - 1, columns)
    total = loop(first, end_before, side("d_v", "y", before=True), total)
    diagonal_tile = divide(a_start, columns)
    total = loop(diagonal_tile, last, side("y", "d_v", before=False), total)
    out["d_keys"][...] = total


def d_keys(
    phi: Phi,
    x: SolveInputs,
    y: Array,
    d_v: Array,
    configuration: Configuration,
    *,
    count: int,
    chunk: int,
) -> Array:
    """Σ_b Φ_ab g_ab k̂_b (m, T, d) in float32, from y and dv (m, T, e).

    `count` of the T tokens are not padding; `chunk` channels are multiplied at once.
    """
    m, tokens, d = x.keys.shape
    inputs = {"keys": x.keys, "y": y, "d_v": d_v}
    if x.segments is not None:
        inputs |= {"segments": x.segments.begin, "ends": x.segments.end}
    result = launch(
        key_gradient,
        (whole(tokens, configuration.rows), m),
        {name: of_head(array, heads=m) for name, array in inputs.items()},
        {"d_keys": of_head(shape_of((m, tokens, d), jnp.float32), configuration.rows)},
        configuration,
        interpret=phi.products.interpret,
        phi=phi,
        columns=configuration.columns,
        chunk=chunk,
        count=count,
    )
    return result["d_keys"]
