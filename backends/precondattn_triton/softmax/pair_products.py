"""Products of the rows of two tiles that are loaded a few channels at a time.

The gradient of a bias holds no tile of rows from one iteration to the next: factors
are loaded anew for each product, so a program needs registers for a few channels only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.tiles import load_tile

CHANNELS = tl.constexpr(32)
"""Channels per product."""


@triton.jit
def row_products_of(
    left, row, is_row, row_stride, left_channel, right, column, is_column, column_stride,
    right_channel, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x yᵀ of a tile of rows x and a tile of rows y, some channels at a time."""
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.static_range(0, PADDED, CHANNELS):
        x = load_tile(
            left + first * left_channel, row, is_row, row_stride, left_channel,
            WIDTH - first, min(PADDED, CHANNELS),
        )  # fmt: skip
        y = load_tile(
            right + first * right_channel, column, is_column, column_stride, right_channel,
            WIDTH - first, min(PADDED, CHANNELS),
        )  # fmt: skip
        acc = tl.dot(x, tl.trans(y), acc, input_precision=PRECISION)
    return acc
