"""The inverses of LUCID's diagonal super-blocks, all at once.

    N = (I + L)⁻¹,    L = stril(Φ) diag(β)  for the forward solve,  diag(β) stril(Φ)  for backward.

By recursive 2×2 block inversion. With X the inverses of diagonal blocks of w rows, the step

    [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]],    that is    X ← X − X (L ∘ lower left) X,

is applied to all pairs of blocks at once: `invert_blocks` does so from w = 1 up to a tile, in
registers. `left_factors` and `right_factors` continue up to a super-block, C A⁻¹ first. For β in
[0, 2] and any keys, no entry of such an inverse is larger than 2, so 16 bits represent them.
Doubling the Neumann series instead would lose all digits for nearly equal keys.

A super-block's inverse is stored by rows, (m, T, S), with 0 above its diagonal.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental import pallas as pl

from precondattn.arrays import Array
from precondattn_pallas.configurations import Configuration
from precondattn_pallas.launch import (
    Constant,
    References,
    divide,
    launch,
    loop,
    remainder,
    shape_of,
)
from precondattn_pallas.lucid.tiles import Phi, SolveInputs, of_head, of_tile, reach
from precondattn_pallas.recurrence.chunk_inverse import unit_lower_inverse

FIRST_BLOCK = 32
"""Tokens of the blocks that are inverted in registers."""


CHANNELS = 32
"""Key channels per product; more would take registers that tiles of the matrix need."""


def system_tile(x: References, i: Array, j: Array, *, phi: Phi, by_row: bool) -> Array:
    """L for rows i and columns j, without the triangular mask."""
    keys, segments = x["keys"], (of_tile(x, "segments", i), of_tile(x, "segments", j))
    result = phi.tile(keys, i, keys, j, *segments, channels=CHANNELS)
    return result * (x["factor"][i][:, None] if by_row else x["factor"][j][None, :])


def invert_blocks(x: References, out: References, *, phi: Phi, by_row: bool) -> None:
    """Invert every diagonal tile, whose size is a power of two."""
    tile = x["keys"].shape[0]
    every = pl.ds(0, tile)
    system = system_tile(x, every, every, phi=phi, by_row=by_row)
    result = unit_lower_inverse(phi.products, system)
    out["inverse"][...] = result.astype(out["inverse"].dtype)


def left_factors(
    x: References,
    out: References,
    *,
    phi: Phi,
    by_row: bool,
    half: int,
    tile: int,
    super_block: int,
) -> None:
    """C A⁻¹ of every pair of inverted blocks of `half` tokens: a tile of it."""
    tiles = half // tile
    pair, tile_index = (f(pl.program_id(0), tiles * tiles) for f in (divide, remainder))
    first = pair * (2 * half)
    i_start = first + half + divide(tile_index, tiles) * tile
    j_start = first + remainder(tile_index, tiles) * tile
    column = pl.multiple_of(remainder(j_start, super_block), tile)
    i = pl.ds(i_start, tile)

    def add(index: Array, total: Array) -> Array:
        m = pl.ds(index * tile, tile)
        system = system_tile(x, i, m, phi=phi, by_row=by_row)
        column_tiles = x["inverse"][m, pl.ds(column, tile)]
        return total + phi.products.dot(system.astype(column_tiles.dtype), column_tiles)

    low, high = j_start, first + half
    if "segments" in x:
        low = jnp.maximum(low, reach(x, i_start, tile)[0])
        high = jnp.minimum(high, reach(x, j_start, tile)[1] + (tile - 1))
    total = jnp.zeros((tile, tile), jnp.float32)
    total = loop(divide(low, tile), divide(high, tile), add, total)
    out["left"][...] = total.astype(out["left"].dtype)


def right_factors(
    x: References, out: References, *, phi: Phi, half: int, tile: int, super_block: int
) -> None:
    """−B⁻¹ (C A⁻¹), a tile of it, written in place of C A⁻¹. No other program reads that tile."""
    tiles = half // tile
    pair, tile_index = (f(pl.program_id(0), tiles * tiles) for f in (divide, remainder))
    second = pair * (2 * half) + half
    i_start = second + divide(tile_index, tiles) * tile
    i = pl.ds(i_start, tile)

    def add(index: Array, total: Array) -> Array:
        m_start = second + index * tile
        column = pl.multiple_of(remainder(m_start, super_block), tile)
        column_tiles = x["inverse"][i, pl.ds(column, tile)]
        left = x["left"][pl.ds(pair * half + index * tile, tile), :]
        return total + phi.products.dot(column_tiles, left)

    low, high = jnp.int32(0), divide(tile_index, tiles) + 1
    if "segments" in x:
        low = divide(jnp.maximum(reach(x, i_start, tile)[0] - second, 0), tile)
        j_start = pair * (2 * half) + remainder(tile_index, tiles) * tile
        end = jnp.maximum(reach(x, j_start, tile)[1] - second, 0)
        high = jnp.minimum(high, divide(end + (tile - 1), tile))
    total = loop(low, high, add, jnp.zeros((tile, tile), jnp.float32))
    out["inverse"][...] = (-total).astype(out["inverse"].dtype)


def inverses(
    phi: Phi, x: SolveInputs, configuration: Configuration, *, super_block: int, backward: bool
) -> Array:
    """N of all super-blocks (m, T, S), in the dtype of the keys."""
    keys, factor, segments, (m, tokens, _) = x.keys, x.factor, x.segments, x.keys.shape
    interpret = phi.products.interpret
    common = {"phi": phi, "interpret": interpret}
    half = min(FIRST_BLOCK, configuration.rows, super_block)
    row_inputs = {"keys": of_head(keys, half, m), "factor": of_head(factor, half, m)}
    everything = {"keys": of_head(keys, heads=m), "factor": of_head(factor, heads=m)}
    bounds = {}
    if segments is not None:
        row_inputs["segments"] = of_head(segments.begin, half, m)
        bounds = {
            "segments": of_head(segments.begin, heads=m),
            "ends": of_head(segments.end, heads=m),
        }
    per_block = super_block // half
    diagonal = pl.BlockSpec((None, half, half), lambda i, h: (h, i, remainder(i, per_block)))
    inverse = jnp.zeros((m, tokens, super_block), keys.dtype)
    shape = shape_of(inverse.shape, inverse.dtype)
    inverse = launch(
        invert_blocks,
        (tokens // half, m),
        {**row_inputs, "inverse": (inverse, diagonal)},
        {"inverse": (shape, diagonal)},
        configuration,
        overwrites="inverse",
        by_row=backward,
        **common,
    )["inverse"]
    while half < super_block:
        tile = min(half, configuration.rows)
        tiles, pairs = half // tile, tokens // (2 * half)
        sizes: dict[str, Constant] = {"half": half, "tile": tile, "super_block": super_block}
        left = launch(
            left_factors,
            (pairs * tiles * tiles, m),
            {**everything, **bounds, "inverse": of_head(inverse, heads=m)},
            {"left": (shape_of((m, pairs * half, half), keys.dtype), _tile_of_left(tile, tiles))},
            configuration,
            by_row=backward,
            **sizes,
            **common,
        )["left"]
        inverse = launch(
            right_factors,
            (pairs * tiles * tiles, m),
            {
                "inverse": of_head(inverse, heads=m),
                "left": (left, _column_of_left(pairs * half, tile, tiles)),
                **bounds,
            },
            {"inverse": (shape, _tile_of_inverse(tile, tiles, super_block))},
            configuration,
            overwrites="inverse",
            **sizes,
            **common,
        )["inverse"]
        half *= 2
    return inverse


def _tile_of_left(tile: int, tiles: int) -> pl.BlockSpec:
    """A row tile of every pair, one after the other; one column tile."""
    return pl.BlockSpec((None, tile, tile), lambda g, h: (h, divide(g, tiles), remainder(g, tiles)))


def _column_of_left(rows: int, tile: int, tiles: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, rows, tile), lambda g, h: (h, 0, remainder(g, tiles)))


def _tile_of_inverse(tile: int, tiles: int, super_block: int) -> pl.BlockSpec:
    """The tile of a program, below the diagonal block of its pair."""

    def index(g: Array, h: Array) -> Array:
        pair, tile_index = divide(g, tiles * tiles), remainder(g, tiles * tiles)
        row = pair * (2 * tiles) + tiles + divide(tile_index, tiles)
        column = remainder(pair * (2 * tiles), super_block // tile) + remainder(tile_index, tiles)
        return h, row, column

    return pl.BlockSpec((None, tile, tile), index)
