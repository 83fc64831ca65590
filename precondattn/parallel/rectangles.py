"""The pairs of a device's queries and another device's visible keys, as rectangles of the mask.

In JAX all devices run one program. Which keys are visible depends on whether they are those of an
earlier device (s < r) or of a later one, and is otherwise the same for all pairs of devices:

    contiguous:  earlier: all queries see all keys; later: none
    zigzag:      earlier: all queries see the first part; later: the second part sees all keys
    cyclic:      part i sees the parts j < i; earlier: also j = i

In `cyclic`, the mask of n parts is a triangle of n × n blocks. It is put together from squares at
each scale w = 1, 2, 4 …: of every 2 w parts, the second w see the first w. The squares of a scale
are one call, as sequences of its batch. About 2 log₂ n calls thus compute no masked pair.

All keys of a rectangle are before all of its queries, if the attention is causal.
"""

from __future__ import annotations

from typing import NamedTuple

from precondattn.arrays import Array, namespace
from precondattn.parallel.layouts import TokenOrder


class Rectangle(NamedTuple):
    """Equal groups of rows; in each group some rows are queries, and some are keys they see."""

    first: int
    """The first row of the first group"""
    groups: int
    stride: int
    """The number of rows in a group"""
    queries: slice
    """The rows of each group that are queries; `keys` are the rows that are visible keys"""
    keys: slice

    @classmethod
    def of_slices(
        cls, tokens: int, queries: slice | None = None, keys: slice | None = None
    ) -> Rectangle:
        """A rectangle with one group of all rows."""
        every = slice(0, tokens)
        return cls(0, 1, tokens, queries or every, keys or every)

    def rows(self, x: Array, which: slice) -> Array:
        """The rows `which` of each group of x (b, tokens, …), as (b · groups, rows, …)."""
        each = self._groups(x)[:, :, which]
        return namespace(x).reshape(each, (-1, *each.shape[2:]))

    def placed(self, x: Array, which: slice, rows: Array) -> Array:
        """x, an array of JAX, with the rows `which` of each group replaced by `rows`."""
        each = self._groups(x)
        each = each.at[:, :, which].set(rows.reshape(*each.shape[:2], *rows.shape[1:]))
        return x.at[:, self._span].set(each.reshape(x.shape[0], -1, *x.shape[2:]))

    @property
    def _span(self) -> slice:
        return slice(self.first, self.first + self.groups * self.stride)

    def _groups(self, x: Array) -> Array:
        whole = x[:, self._span]
        return namespace(x).reshape(whole, (x.shape[0], self.groups, self.stride, *x.shape[2:]))


class SeenKeys(NamedTuple):
    """The rectangles of another device's keys that a device's queries see."""

    always: tuple[Rectangle, ...]
    before: tuple[Rectangle, ...]
    """Further rectangles if the keys are of an earlier device"""
    after: tuple[Rectangle, ...]
    """Further rectangles if the keys are of a later device"""


def seen(order: TokenOrder, tokens: int, *, causal: bool) -> SeenKeys:
    """The visible keys, if each device has `tokens` tokens."""
    every = Rectangle.of_slices(tokens)
    if not causal:
        return SeenKeys((every,), (), ())
    if order.name == "contiguous":
        return SeenKeys((), (every,), ())
    if order.name == "zigzag":
        half = tokens // 2
        earlier = Rectangle.of_slices(tokens, keys=slice(0, half))
        later = Rectangle.of_slices(tokens, queries=slice(half, tokens))
        return SeenKeys((), (earlier,), (later,))
    part = order.part_of(tokens)
    same = slice(0, part)
    return SeenKeys(
        tuple(_triangle(tokens // part, part)),
        (Rectangle(0, tokens // part, part, same, same),),
        (),
    )


def _triangle(count: int, part: int) -> list[Rectangle]:
    """The rectangles in which each of `count` parts sees all parts before it."""
    rectangles, width = [], 1
    while width < count:
        groups, rest = divmod(count, 2 * width)
        side, stride = width * part, 2 * width * part
        keys = slice(0, side)
        if groups:
            rectangles.append(Rectangle(0, groups, stride, slice(side, stride), keys))
        if rest > width:
            last = slice(side, rest * part)
            rectangles.append(Rectangle(groups * stride, 1, rest * part, last, keys))
        width *= 2
    return rectangles
