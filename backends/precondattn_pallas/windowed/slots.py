"""The token in each slot of a window, and loads and stores of the rows of these tokens.

Slots are numbered as in `kernel_backend/windows.py`. A slot without a token is masked; its index is
the number of tokens, one beyond the last.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from precondattn.arrays import Array
from precondattn.kernel_backend.windows import WindowGrid, WindowSize
from precondattn_pallas.launch import divide, remainder


class SlotPlaces(NamedTuple):
    """The tokens of the slots of a call's windows."""

    grid: WindowGrid
    size: WindowSize
    t: int
    s: int

    def keys(self, window: Array, slot: Array) -> tuple[Array, Array]:
        """The key in each slot of a window, and whether there is one."""
        grid, size = self.grid, self.size
        row = divide(window, grid.across) * size.rows + divide(slot, size.columns)
        column = remainder(window, grid.across) * size.columns + remainder(slot, size.columns)
        row, column = row + grid.first_row, column + grid.first_column
        token = row * grid.columns + column
        inside = (row >= 0) & (column >= 0) & (column < grid.columns) & (token < self.s)
        is_there = inside & (slot < size.slots)
        return jnp.where(is_there, token, self.s), is_there

    def queries(self, window: Array, slot: Array) -> tuple[Array, Array]:
        """The query in each slot, which are the last t tokens, and whether there is one."""
        token, is_there = self.keys(window, slot)
        query = token - (self.s - self.t)
        is_there = is_there & (query >= 0)
        return jnp.where(is_there, query, self.t), is_there

    def entries(self, query_slot: Array, key_slot: Array) -> Array:
        """The entry of the table of each pair of slots."""
        columns = self.size.columns
        down = divide(query_slot, columns) - divide(key_slot, columns) + (self.size.rows - 1)
        right = remainder(query_slot, columns) - remainder(key_slot, columns) + (columns - 1)
        return down * (2 * columns - 1) + right


def slots(tile: Array, count: int) -> Array:
    """The slots of a tile."""
    return tile * count + lax.broadcasted_iota(jnp.int32, (count,), 0)


def and_valid(valid: Array, index: Array, is_there: Array) -> Array:
    """Whether each of these tokens exists and is valid; `valid` is None if all are."""
    if valid is None:
        return is_there
    return is_there & (plgpu.load(valid.at[index], mask=is_there, other=0) != 0)


def load_rows(
    array: Array,
    index: Array,
    is_row: Array,
    width: int,
    head: Array | None = None,
    first: Array = 0,
) -> Array:
    """Rows of an array (tokens, channels), or of one head of (tokens, heads, channels), from the
    first channel on; 0 where there is none."""
    at, mask = _places(index, is_row, width, head, first)
    return plgpu.load(array.at[at], mask=mask, other=0)


def store_rows(array: Array, index: Array, is_row: Array, rows: Array) -> None:
    """Write rows of an array (tokens, channels); slots without a token are not written."""
    at, mask = _places(index, is_row, rows.shape[1], None, 0)
    plgpu.store(array.at[at], rows, mask=mask)


def load_numbers(
    array: Array, index: Array, is_there: Array, other: float, head: Array | None = None
) -> Array:
    """Numbers of an array (tokens), or of one head of (heads, tokens)."""
    at = (index,) if head is None else (jnp.full_like(index, head), index)
    return plgpu.load(array.at[at], mask=is_there, other=other)


def _places(
    index: Array, is_row: Array, width: int, head: Array, first: Array
) -> tuple[tuple[Array, ...], Array]:
    """The index of every element, and whether it exists."""
    shape = (index.shape[0], width)
    row = lax.broadcast_in_dim(index, shape, (0,))
    channel = first + lax.broadcasted_iota(jnp.int32, shape, 1)
    mask = lax.broadcast_in_dim(is_row, shape, (0,))
    return (row, channel) if head is None else (row, jnp.full_like(row, head), channel), mask
