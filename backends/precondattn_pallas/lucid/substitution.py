"""Block substitution with LUCID's matrix, one super-block after the other; Φ is never stored.

Forward, from the first super-block J to the last, with N_J from `inverse.py` and R = v,

    ρ_J = N_J R_J,    y_J = β_J ρ_J,    R_I −= Φ_IJ y_J  for all later I;

backward, from the last to the first, with R = dy,

    X_J = N_Jᵀ R_J,    dv_J = β_J X_J,    R_I −= Φ_JIᵀ dv_J  for all earlier I.

Φ is symmetric, so one kernel, `update`, serves both. In products of 16 bits, right sides are
divided by a power of two for each channel and super-block of S tokens, so that the largest is at
most 2¹² / S: since no entry of N is larger than 2, no y is larger than 2¹⁵, which float16
represents, and right sides that are far smaller keep their digits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from precondattn.arrays import Array
from precondattn_pallas.configurations import Configuration
from precondattn_pallas.launch import References, divide, launch, loop, shape_of
from precondattn_pallas.lucid.tiles import Phi, SolveInputs, of_head, of_tile, reach


class Solved(NamedTuple):
    """The solution at all tokens (m, T, e), in float32."""

    values: Array
    """y, or backward dv"""
    before_beta: Array
    """ρ, or backward X"""


def apply_inverse(x: References, out: References, *, phi: Phi, tile: int, backward: bool) -> None:
    """N_J R_J or N_Jᵀ R_J: a tile of rows of one super-block, and some channels."""
    own_block = pl.program_id(0)
    start = x["start"][0]
    tiles = x["sides"].shape[0] // tile

    def add(index: Array, total: Array) -> Array:
        row, column = (index, own_block) if backward else (own_block, index)
        block = x["inverse"][pl.ds(start + row * tile, tile), pl.ds(column * tile, tile)]
        sides = x["sides"][pl.ds(index * tile, tile), :]
        return total + phi.products.dot(block, sides, left=backward)

    low, high = (own_block, tiles) if backward else (0, own_block + 1)
    out["solution"][...] = loop(low, high, add, jnp.zeros(out["solution"].shape, jnp.float32))


def update(x: References, out: References, *, phi: Phi, columns: int, backward: bool) -> None:
    """R_I −= Φ_IJ y_J of the super-block J that begins at `start`, for some rows and channels."""
    rows = x["i_keys"].shape[0]
    super_block = x["j_keys"].shape[0]
    i_start, start = pl.program_id(0) * rows, x["start"][0]
    low, high = jnp.int32(0), jnp.int32(super_block // columns)
    if "segments" in x:
        begin, end = (jnp.clip(at - start, 0, super_block) for at in reach(x, 0, rows))
        low, high = divide(begin, columns), divide(end + (columns - 1), columns)
    is_other = i_start < start if backward else i_start >= start + super_block

    @pl.when(is_other & (low < high))
    def _() -> None:
        own_rows, i_segments = pl.ds(0, rows), of_tile(x, "segments", ...)

        def add(index: Array, total: Array) -> Array:
            j = pl.ds(index * columns, columns)
            j_segments = of_tile(x, "j_segments", j)
            weights = phi.tile(x["i_keys"], own_rows, x["j_keys"], j, i_segments, j_segments)
            values = x["operand"][j, :]
            return total + phi.products.dot(weights.astype(values.dtype), values)

        total = loop(low, high, add, jnp.zeros((rows, out["right"].shape[1]), jnp.float32))
        out["right"][...] = x["right"][...] - total * x["sizes"][...][None, :]


def substitute(
    phi: Phi,
    x: SolveInputs,
    inverse: Array,
    right: Array,
    cuts: tuple[Configuration, Configuration],
    *,
    count: int,
    chunk: int,
    backward: bool,
) -> Solved:
    """The solution of the system, or of its transpose, with `right` (m, T, e) in float32.

    The first `count` of the T tokens are needed; a program processes `chunk` channels.
    """
    keys, factor, segments, m = x.keys, x.factor, x.segments, x.keys.shape[0]
    super_block, e = inverse.shape[2], right.shape[2]
    blocks = -(-count // super_block)
    by_inverse, by_update = cuts
    start_spec = pl.BlockSpec((1,), lambda i, h, c: (0,))

    def chunk_of(array: Array) -> tuple[Array, pl.BlockSpec]:
        """An array (m, S, e), with the chunk of channels of a program."""
        return array, pl.BlockSpec((None, super_block, chunk), lambda i, h, c: (h, 0, c))

    def solve(start: Array, sides: Array) -> Array:
        tile = by_inverse.rows
        return launch(
            apply_inverse,
            (super_block // tile, m, e // chunk),
            {
                "start": (start[None], start_spec),
                "inverse": of_head(inverse),
                "sides": chunk_of(sides),
            },
            {
                "solution": (
                    shape_of((m, super_block, e), jnp.float32),
                    pl.BlockSpec((None, tile, chunk), lambda i, h, c: (h, i, c)),
                )
            },
            by_inverse,
            interpret=phi.products.interpret,
            phi=phi,
            tile=tile,
            backward=backward,
        )["solution"]

    def updated(start: Array, operand: Array, sizes: Array, right: Array) -> Array:
        rows = by_update.rows
        block = pl.BlockSpec((None, rows, chunk), lambda i, h, c: (h, i, c))
        inputs = {
            "start": (start[None], start_spec),
            "i_keys": of_head(keys, rows),
            "j_keys": of_head(_part(keys, start, super_block)),
            "operand": chunk_of(operand),
            "sizes": (sizes[:, 0], pl.BlockSpec((None, chunk), lambda i, h, c: (h, c))),
            "right": (right, block),
        }
        if segments is not None:
            inputs["segments"] = of_head(segments.begin, rows, m)
            inputs["ends"] = of_head(segments.end, rows, m)
            inputs["j_segments"] = of_head(_part(segments.begin, start, super_block), heads=m)
        return launch(
            update,
            (-(-count // rows), m, e // chunk),
            inputs,
            {"right": (shape_of(right.shape, right.dtype), block)},
            by_update,
            interpret=phi.products.interpret,
            overwrites="right",
            phi=phi,
            columns=by_update.columns,
            backward=backward,
        )["right"]

    def one(index: Array, carried: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        right, values, before = carried
        start = jnp.asarray(blocks - 1 - index if backward else index, jnp.int32) * super_block
        sides = _part(right, start, super_block)
        sizes = _powers_of_two(sides) if keys.dtype == jnp.float16 else jnp.ones_like(sides[:, :1])
        solution = solve(start, (sides / sizes).astype(keys.dtype))
        solved = solution * _part(factor, start, super_block)[..., None]
        right = updated(start, solved.astype(keys.dtype), sizes, right)
        values = lax.dynamic_update_slice_in_dim(values, solved * sizes, start, 1)
        before = lax.dynamic_update_slice_in_dim(before, solution * sizes, start, 1)
        return right, values, before

    empty = jnp.zeros(right.shape, jnp.float32)
    _, values, before = lax.fori_loop(0, blocks, one, (right, empty, empty))
    return Solved(values, before)


def _part(array: Array, start: Array, count: int) -> Array:
    """A range of tokens, which are on the second axis."""
    return lax.dynamic_slice_in_dim(array, start, count, 1)


def _powers_of_two(right: Array) -> Array:
    """The powers of two by which right sides (m, S, e) are divided, one for a channel (m, 1, e)."""
    largest = jnp.max(jnp.abs(right), axis=1, keepdims=True)
    exponent = jnp.ceil(jnp.log2(jnp.where(largest > 0, largest, 1.0)))
    return jnp.exp2(jnp.clip(exponent - 12 + math.log2(right.shape[1]), -126.0, 126.0))
