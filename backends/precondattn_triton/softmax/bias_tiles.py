"""The tiles of pairs of a bias, which heads and sequences may share, and the gradient of a tile."""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.tiles import tile_of_program


@triton.jit
def bias_tile_of_program(t, s, heads, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """This program's tile of queries, the first of its keys, and the first batch and head that have
    the bias. `heads` is the number of different heads of the bias."""
    across = tl.cdiv(s, COLUMNS)
    pair, batch, head = tile_of_program(tl.cdiv(t, ROWS) * across, heads)
    return pair // across, pair % across * COLUMNS, batch, head


@triton.jit
def store_pairs(array, first, rows, columns, s, is_row, is_column, values):
    """Store a tile of pairs, whose queries begin at row `first` of the array (…, s)."""
    at = (first + rows[:, None]) * s + columns[None, :]
    mask = is_row[:, None] & is_column[None, :]
    tl.store(array + at, values.to(array.dtype.element_ty), mask=mask)
