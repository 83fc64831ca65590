"""Widths of keys and values: those of tiles, and parts of the channels of wider ones.

Keys or values that are wider than a tile, for which the registers have no room, are *wide*. Only
softmax attention and LASER have kernels for them. Their products are sums over chunks of channels,
for which both factors are loaded anew,

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

WIDEST_KEY = 256
WIDEST_VALUE = {"float16": 512, "bfloat16": 512, "float32": 256}
"""The widest values that fit the registers and the shared memory of a multiprocessor. Float32
allows fewer, since each factor is split into three."""

WIDEST_IN_PARTS = 1024
"""The widest keys and values of LASER's kernels."""


def is_wide(dtype: str, key: int, value: int) -> bool:
    """Whether keys or values are wider than a tile."""
    return any(width > widest for _, width, widest in limits(dtype, key, value))


def limits(dtype: str, key: int, value: int) -> tuple[tuple[str, int, int], ...]:
    """(name, width, widest supported width) of keys and of values."""
    return ("keys", key, WIDEST_KEY), ("values", value, WIDEST_VALUE[dtype])


def refuses_widths(kernels: str, dtype: str, key: int, value: int) -> str | None:
    """The reason why these kernels do not support the widths; None where they do."""
    for what, width, widest in limits(dtype, key, value):
        if width > widest:
            return (
                f"has kernels for {kernels} in {dtype} with {what} of width {widest} at most; "
                f"found {width}"
            )
    return None


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
