"""Parts of the channels, where a tile, or the sum of a product, would not fit the registers.

Keys or values that are wider than a tile are *wide*. Their products are sums over chunks of
channels, for which both factors are loaded anew,

    ⟨x_i, y_j⟩ = Σ_chunks ⟨x_i, y_j⟩,

and a program computes one part of the channels of its result, from scores that it recomputes. With
p parts, forward has t s (p d + e) products per head, the query gradient t s (p d + p e + d) and the
key gradient t s (p d + p e + d + e), half of them if causal.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from precondattn_triton.tiles import load_channels


class ChannelParts(NamedTuple):
    """How channels of wide heads are divided."""

    part: int
    """The channels of a result that a program computes"""
    chunk: int
    """The channels that a product sums over"""


PARTS = {True: ChannelParts(256, 128), False: ChannelParts(128, 64)}
"""The parts by whether factors have 16 bits."""

PAIR_CHUNK = 32
"""The chunk of a bias gradient, which keeps no tile of rows in registers."""


@triton.jit
def products_by_chunk(
    x, x_start, rows, is_row, y, y_start, columns, is_column,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """⟨x_i, y_j⟩ of two tiles of tokens of `Heads`, a chunk of channels at a time."""
    total = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    for first in range(0, WIDTH, CHUNK):
        i = load_channels(x, x_start, rows, is_row, WIDTH, CHUNK, first)
        j = load_channels(y, y_start, columns, is_column, WIDTH, CHUNK, first)
        total = tl.dot(i, tl.trans(j.to(i.dtype)), total, input_precision=PRECISION)
    return total
