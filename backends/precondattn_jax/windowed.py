"""Windowed attention (Swin): the grid is divided into windows by reshaping, all in one batch.

    (b, s, h, ·)  →  grid (b, R, C, h, ·), padded to whole windows and rolled by the shift
                  →  (b windows, h, w, ·)

The indices that `precondattn_portable.windowed` has in NumPy arrays are computed from iotas here,
because JAX does not partition functions that contain constant arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from math import prod
from typing import cast

import jax.numpy as jnp
from jax import Array, lax

import precondattn as pa
from precondattn.arrays import Arrays
from precondattn.frame import Frame
from precondattn.spec.grid_windows import GridWindows
from precondattn_jax.definition import InFullPrecision
from precondattn_portable import windowed
from precondattn_portable.layout import padded
from precondattn_portable.windowed import GatheredWindows, WindowedCall, WindowPart


class TokenGrid:
    """A grid of s tokens, whose last row may be incomplete, and its windows."""

    def __init__(self, windows: GridWindows, s: int) -> None:
        self.windows, self.s = windows, s
        columns = windows.columns
        self.shape = (s,) if columns is None else (-(-s // columns), columns)
        pairs = zip(self.shape, windows.size, strict=True)
        self.whole = tuple(-(-n // w) * w for n, w in pairs)
        """The grid's size, padded to whole windows"""
        self.axes = tuple(range(1, 1 + len(self.whole)))

    def cut(self, x: Array) -> Array:
        """(b, s, heads, ·) as (b windows, w, heads, ·), 0 in slots without a token."""
        b, rest = x.shape[0], x.shape[2:]
        x = padded(x, 0, prod(self.shape) - x.shape[1], axis=1)
        x = jnp.reshape(x, (b, *self.shape, *rest))
        for axis, n in enumerate(self.whole, 1):
            x = padded(x, 0, n - x.shape[axis], axis=axis)
        x = jnp.roll(x, tuple(-shift for shift in self.windows.shift), self.axes)
        x = jnp.reshape(x, (b, *self._sides(), *rest))
        x = jnp.transpose(x, (*self._order(), *range(len(self._order()), x.ndim)))
        return jnp.reshape(x, (-1, prod(self.windows.size), *rest))

    def joined(self, x: Array, b: int) -> Array:
        """The transpose of `cut`."""
        rest, order = x.shape[2:], self._order()
        sides = self._sides()
        x = jnp.reshape(x, (b, *(sides[i - 1] for i in order[1:]), *rest))
        back = sorted(range(len(order)), key=order.__getitem__)
        x = jnp.transpose(x, (*back, *range(len(order), x.ndim)))
        x = jnp.roll(jnp.reshape(x, (b, *self.whole, *rest)), tuple(self.windows.shift), self.axes)
        x = x[(slice(None), *map(slice, self.shape))]
        return jnp.reshape(x, (b, prod(self.shape), *rest))[:, : self.s]

    def _sides(self) -> tuple[int, ...]:
        pairs = zip(self.whole, self.windows.size, strict=True)
        return tuple(side for n, w in pairs for side in (n // w, w))

    def _order(self) -> tuple[int, ...]:
        """The order of axes in which a window's number comes before the place in the window."""
        last = 2 * len(self.whole) + 1
        return (0, *range(1, last, 2), *range(2, last, 2))

    def hidden(self) -> Array:
        """Which pairs do not attend to each other, (windows, w, w)."""
        position = jnp.arange(self.s, dtype="int32")
        label = jnp.zeros_like(position)
        axes = zip(
            self.windows.coordinates(position),
            self.windows.size,
            self.windows.shift,
            self.shape,
            strict=True,
        )
        for x, w, shift, n in axes:
            label = label * (n + 1) + (x + w - shift) // w
        label = self.cut(label[None, :, None] + 1)[..., 0]  # 0 without a token
        return (label[:, :, None] != label[:, None, :]) | (label[:, None, :] == 0)


class GridCall(WindowedCall):
    """The arrays of a call, all windows at once."""

    @cached_property
    def grid(self) -> TokenGrid:
        return TokenGrid(self.leaf.windows, self.x["k"].shape[1])

    def windows(self, together: int) -> Iterator[GatheredWindows]:
        part = cast("WindowPart", None)  # There is a single part, which nothing reads.
        yield self.some(part)

    def gathered(self, x: Array, part: WindowPart | None = None) -> Array:
        return self.ops.heads_first(self.grid.cut(x))

    def is_filled(self, part: WindowPart | None) -> bool:
        return self.grid.s == prod(self.grid.whole)

    def by_token(self, slots: list[Array]) -> Array:
        (rows,) = slots
        b = rows.shape[0]
        return self.grid.joined(jnp.reshape(rows, (-1, self.slots, *rows.shape[2:])), b)

    @property
    def slots(self) -> int:
        return prod(self.leaf.windows.size)

    def never_hidden(self, part: WindowPart | None) -> Array | None:
        if self.is_filled(part) and not any(self.leaf.windows.shift):
            return None
        visible, b = ~self.grid.hidden(), self.x["q"].shape[0]
        each = lax.broadcast(visible, (b,))
        return jnp.reshape(each, (-1, 1, self.slots, self.slots))


class WindowedBlocks(InFullPrecision[pa.Windowed], windowed.WindowedBlocks):
    """Algorithm of `Windowed`."""

    def call(self, x: Arrays, frame: Frame) -> GridCall:
        return GridCall(self.ops, self.leaf, x, frame)
