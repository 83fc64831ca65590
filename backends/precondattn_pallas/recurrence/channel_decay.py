"""Products of pairs of tokens in a chunk, with one decay for each channel (GLA, KDA): kernels.

    F(A, q, k) = Σ_{j≤i,c} A_ij q_ic k_jc D_ijc

(`channel_tiles.py`). The scores of q and k are its derivative with respect to A; what A reads from
k is that with respect to q, and so on. A program has a tile b of one query of each token, and
iterates over the chunk's earlier tiles a and later tiles l. `between` is the total decay of the
tiles between:

    read_b    = Σ_a A_ba (between_ab ∘ until_a ∘ k_a),       dF/dq_b = since_b ∘ read_b,
    written_b = Σ_l A_lbᵀ (between_bl ∘ since_l ∘ q_l),      dF/dk_b = until_b ∘ written_b,

each plus the part within the tile. The gates of b also separate the tokens of a from those of l; a
loop over those pairs adds their part. XLA sums k's and the gates' gradients over the queries of a
state, and the gates of a tile.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from precondattn.arrays import Array, Arrays
from precondattn_pallas.launch import References, divide, loop, remainder
from precondattn_pallas.precision import Products
from precondattn_pallas.recurrence.channel_tiles import (
    TILE,
    d_gates_of,
    gradients_within,
    read_within,
    scores_within,
    since_of,
    until_of,
)
from precondattn_pallas.recurrence.chunk_arrays import ChunkGrid, ChunkPlan, Rows, each_query, empty
from precondattn_pallas.recurrence.chunk_tiles import every_block

ALL = slice(None)


def channel_scores(
    x: References, out: References, *, products: Products, block: int, blocks: int
) -> None:
    """dF/dA: the rows of tile b."""
    row_tile, count = _tile_in_chunk(x, blocks)
    width, zeros = x["k"].shape[1], jnp.zeros((TILE, TILE), jnp.float32)

    def earlier(a: Array, done: Array) -> Array:
        def add(c: Array, total: Array) -> Array:
            keys = _earlier(products, x, a, row_tile, c)
            return total + products.dot(_later(products, x, row_tile, c), keys, right=True)

        out["scores"][:, _tokens(a)] = every_block(width, block, add, zeros)
        return done

    def within(c: Array, total: Array) -> Array:
        return total + scores_within(products, *(_tile(x, name, row_tile, c) for name in "qkg"))

    def clear(a: Array, done: Array) -> Array:
        out["scores"][:, _tokens(a)] = zeros
        return done

    loop(0, row_tile, earlier, jnp.int32(0))
    out["scores"][:, _tokens(row_tile)] = every_block(width, block, within, zeros)
    loop(row_tile + 1, count, clear, jnp.int32(0))


def channel_read(x: Array, out: References, *, products: Products, blocks: int) -> None:
    """dF/dq: a block of channels of tile b."""
    row_tile, _ = _tile_in_chunk(x, blocks)
    k, g = (_tile(x, name, row_tile) for name in "kg")
    within = read_within(products, _square(x, row_tile, row_tile), k, g)
    out["d_q"][...] = within + _read(products, x, row_tile, row_tile) * since_of(products, g)


def channel_gradient(x: Array, out: References, *, products: Products, blocks: int) -> None:
    """dF/dq, dF/dk and dF/dg: a block of channels of tile b."""
    row_tile, count = _tile_in_chunk(x, blocks)
    q, k, g = (_tile(x, name, row_tile) for name in "qkg")

    def one(tile: Array, carried: Array) -> Array:
        written, crossing = carried
        later = _later(products, x, tile)
        crossing = crossing + jnp.sum(_read(products, x, tile, row_tile) * later, axis=0)
        later = later * _between(x, row_tile, tile)
        return written + products.dot(_square(x, tile, row_tile), later, left=True), crossing

    start = jnp.zeros(g.shape, jnp.float32), jnp.zeros(g.shape[1:], jnp.float32)
    written, crossing = loop(row_tile + 1, count, one, start)
    from_earlier = _read(products, x, row_tile, row_tile) * since_of(products, g)
    written = written * until_of(products, g)
    d_q, d_k, d_g = gradients_within(products, _square(x, row_tile, row_tile), q, k, g)
    out["d_q"][...] = d_q + from_earlier
    out["d_k"][...] = d_k + written
    out["d_g"][...] = d_g + d_gates_of(products, from_earlier * q, written * k) + crossing[None, :]


def _tile_in_chunk(x: References, blocks: int) -> tuple[Array, int]:
    """The index of a program's tile in its chunk, and the number of tiles."""
    count = x["k"].shape[0] // TILE
    return remainder(divide(pl.program_id(0), blocks), count), count


def _tokens(tile: Array) -> Array:
    return pl.ds(pl.multiple_of(tile * TILE, TILE), TILE)


def _tile(x: References, name: str, tile: Array, columns: Array = ALL) -> Array:
    return x[name][_tokens(tile), columns].astype(jnp.float32)


def _square(x: References, row: Array, column: Array) -> Array:
    return x["a"][_tokens(row), _tokens(column)]


def _between(x: References, low: Array, high: Array, columns: Array = ALL) -> Array:
    """The decay over the tiles low < t < high (1, w)."""
    totals = x["totals"][:, columns]
    t = lax.broadcasted_iota(jnp.int32, totals.shape, 0)
    within = (t > low) & (t < high)
    return jnp.exp(jnp.sum(jnp.where(within, totals, jnp.float32(0)), axis=0))[None, :]


def _later(products: Products, x: Array, tile: Array, columns: Array = ALL) -> Array:
    """since ∘ q of a tile."""
    return _tile(x, "q", tile, columns) * since_of(products, _tile(x, "g", tile, columns))


def _earlier(products: Products, x: Array, tile: Array, stop: Array, columns: Array = ALL) -> Array:
    """k of a tile before another one."""
    decay = until_of(products, _tile(x, "g", tile, columns)) * _between(x, tile, stop, columns)
    return _tile(x, "k", tile, columns) * decay


def _read(products: Products, x: References, row: Array, stop: Array) -> Array:
    """The sum that tile `row` reads from the tiles before `stop`, decayed to its first token."""

    def one(a: Array, total: Array) -> Array:
        return total + products.dot(_square(x, row, a), _earlier(products, x, a, row))

    return loop(0, stop, one, jnp.zeros((TILE, x["k"].shape[1]), jnp.float32))


def scores_of_channels(plan: ChunkPlan, x: Rows) -> Array:
    """dF/dA (m, r, T, C), from q, k and g."""
    m, r, tokens, d = x["q"].shape
    grid = ChunkGrid(TILE, tokens // TILE, m * r)
    result = plan.launch(
        channel_scores,
        "channel_scores",
        grid.shape,
        _inputs(grid, plan, x, d, "qkg"),
        {"scores": grid.rows(empty(m * r, tokens, plan.chunk))},
        block=plan.block("channel_scores", d),
        blocks=1,
    )
    return result["scores"].reshape(m, r, tokens, plan.chunk)


def read_of_channels(plan: ChunkPlan, x: Rows, a: Array) -> Array:
    """dF/dq (m, r, T, d), from A (m, r, T, C), k and g."""
    (d_q,) = _by_blocks(plan, channel_read, {**x, "a": a}, "akg", "d_q")
    return d_q


def gradients_of_channels(plan: ChunkPlan, x: Rows, a: Array) -> tuple[Array, Array, Array]:
    """dF/dq (m, r, T, d), dF/dk and dF/dg (m, T, d), from A (m, r, T, C), q, k and g."""
    d_q, d_k, d_g = _by_blocks(plan, channel_gradient, {**x, "a": a}, "aqkg", "d_q", "d_k", "d_g")
    return d_q, jnp.sum(d_k, axis=1), jnp.sum(d_g, axis=1)


def _by_blocks(
    plan: ChunkPlan, kernel: Callable[..., None], x: Rows, names: str, *outputs: str
) -> list[Array]:
    """The outputs (m, r, T, d) of a kernel with a program for each tile and block of channels."""
    (m, r, tokens, _), d, name = x["a"].shape, x["k"].shape[2], kernel.__name__
    width = plan.block(name, d)
    grid = ChunkGrid(TILE, tokens // TILE, m * r, d // width)
    result = plan.launch(
        kernel,
        name,
        grid.shape,
        _inputs(grid, plan, x, width, names),
        {output: grid.rows(empty(m * r, tokens, d), width) for output in outputs},
        blocks=d // width,
    )
    return [result[output].reshape(m, r, tokens, d) for output in outputs]


def _inputs(grid: ChunkGrid, plan: ChunkPlan, x: Rows, width: int, names: str) -> Arrays:
    """Blocks of a whole chunk: all columns of A, and of the others the program's columns."""
    tiles = plan.chunk // TILE
    result = {}
    for name in names:
        array = each_query(x[name]) if name in ("a", "q") else x[name]
        result[name] = grid.around(array, tiles, None if name == "a" else width)
    m, tokens, d = x["g"].shape
    totals = jnp.sum(x["g"].reshape(m, tokens // TILE, TILE, d), axis=2)
    return {**result, "totals": grid.around(totals, tiles, width)}
