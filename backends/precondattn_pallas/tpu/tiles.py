"""Numbers of a block's tokens, as a row or a column of a tile.

In memory, up to eight numbers of each token are the rows of a tile (8, 128) for each block; of
other arrangements a TPU would fill up every number to a register's row. Along a row of tokens a
kernel multiplies columns, along a column rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from precondattn_pallas.recurrence.chunk_tiles import tokens_of
from precondattn_pallas.tpu.launch import SUBLANES


def numbers_of(rows: Sequence[Any], size: int) -> Any:
    """Arrays (m, T) as (m, T / size, 8, size), in float32; rows that nothing is given for are 0."""
    m, tokens = rows[0].shape
    stacked = jnp.stack([row.astype(jnp.float32) for row in rows], axis=1)
    stacked = jnp.pad(stacked, ((0, 0), (0, SUBLANES - len(rows)), (0, 0)))
    return jnp.swapaxes(stacked.reshape(m, SUBLANES, tokens // size, size), 1, 2)


def number_of(numbers: Any, row: int) -> Any:
    """One row of it, (m, T)."""
    m, blocks, _, size = numbers.shape
    return numbers[:, :, row].reshape(m, blocks * size)


def tile_of(rows: Sequence[Any]) -> Any:
    """Rows (1, C) as a tile (8, C)."""
    size = rows[0].shape[1]
    place = lax.broadcasted_iota(jnp.int32, (SUBLANES, size), 0)
    found = jnp.zeros((SUBLANES, size), jnp.float32)
    for index, row in enumerate(rows):
        found = jnp.where(place == index, row, found)
    return found


def as_column(row: Any) -> Any:
    """(1, C) as (C, 1)."""
    i, j = tokens_of(row.shape[1])
    return jnp.sum(jnp.where(i == j, row, jnp.float32(0)), axis=1, keepdims=True)


def as_row(column: Any) -> Any:
    """(C, 1) as (1, C)."""
    i, j = tokens_of(column.shape[0])
    return jnp.sum(jnp.where(i == j, column, jnp.float32(0)), axis=0, keepdims=True)
