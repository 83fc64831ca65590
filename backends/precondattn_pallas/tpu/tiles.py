"""Numbers of a block's tokens, as a row or a column of a tile.

In memory, up to eight numbers per token are the rows of a tile (8, 128) for each block; in other
layouts a TPU would pad every number to a register's row. As a row, numbers multiply the columns of
a tile; as a column, its rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from precondattn.arrays import Array
from precondattn_pallas.recurrence.chunk_tiles import tokens_of
from precondattn_pallas.tpu.launch import SUBLANES


def numbers_of(rows: Sequence[Array], size: int) -> Array:
    """Arrays (m, T) as (m, T / size, 8, size), in float32; missing rows are 0."""
    m, tokens = rows[0].shape
    stacked = jnp.stack([row.astype(jnp.float32) for row in rows], axis=1)
    stacked = jnp.pad(stacked, ((0, 0), (0, SUBLANES - len(rows)), (0, 0)))
    return jnp.swapaxes(stacked.reshape(m, SUBLANES, tokens // size, size), 1, 2)


def number_of(numbers: Array, row: int) -> Array:
    """A row of the array of `numbers_of`, as (m, T)."""
    m, blocks, _, size = numbers.shape
    return numbers[:, :, row].reshape(m, blocks * size)


def tile_of(rows: Sequence[Array]) -> Array:
    """A tile (8, C) of rows (1, C)."""
    size = rows[0].shape[1]
    row_index = lax.broadcasted_iota(jnp.int32, (SUBLANES, size), 0)
    result = jnp.zeros((SUBLANES, size), jnp.float32)
    for index, row in enumerate(rows):
        result = jnp.where(row_index == index, row, result)
    return result


def as_column(row: Array) -> Array:
    """A row (1, C) as a column (C, 1)."""
    i, j = tokens_of(row.shape[1])
    return jnp.sum(jnp.where(i == j, row, jnp.float32(0)), axis=1, keepdims=True)


def as_row(column: Array) -> Array:
    """A column (C, 1) as a row (1, C)."""
    i, j = tokens_of(column.shape[0])
    return jnp.sum(jnp.where(i == j, column, jnp.float32(0)), axis=0, keepdims=True)
