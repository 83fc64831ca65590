"""Which of a device's queries see which of another's keys, as products of rows and columns.

In JAX all devices run one program. What is seen depends on whether the keys are of a device before
(s < r) or after, and is otherwise the same for all pairs of devices:

    contiguous:  before, all queries see all keys; after, none
    zigzag:      before, all queries see the first part; after, the second part sees all keys
    cyclic:      part i sees the parts j < i; before, j = i too

With parts of B tokens the last is a triangle of n × n blocks. It is put together from squares on
each scale w = 1, 2, 4 …: of every 2 w parts, the second w see the first w. These are one call with
the squares as sequences of its batch. So no pair of masked tokens is computed, in about 2 log₂ n
calls.

All keys of a rectangle are before all of its queries, if the attention is causal.
"""

from __future__ import annotations

from typing import NamedTuple

from precondattn.arrays import Array, namespace
from precondattn.parallel.layouts import TokenOrder


class Rectangle(NamedTuple):
    """Rows of a device's queries, and of a device's keys that they see, in equal groups."""

    first: int
    """The first row of the first group"""
    groups: int
    stride: int
    """The rows of a group"""
    queries: slice
    """Rows of each group"""
    keys: slice

    @classmethod
    def of_slices(
        cls, tokens: int, queries: slice | None = None, keys: slice | None = None
    ) -> Rectangle:
        """One group, of all rows."""
        every = slice(0, tokens)
        return cls(0, 1, tokens, queries or every, keys or every)

    def rows(self, x: Array, which: slice) -> Array:
        """Those rows of x (b, tokens, …) as (b groups, rows, …)."""
        each = self._groups(x)[:, :, which]
        return namespace(x).reshape(each, (-1, *each.shape[2:]))

    def placed(self, x: Array, which: slice, rows: Array) -> Array:
        """x of JAX with these rows in their place."""
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
    """What queries see of another device's keys."""

    always: tuple[Rectangle, ...]
    before: tuple[Rectangle, ...]
    """Besides, if the keys are of a device before"""
    after: tuple[Rectangle, ...]


def seen(order: TokenOrder, tokens: int, *, causal: bool) -> SeenKeys:
    """Of devices with so many tokens each."""
    every = Rectangle.of_slices(tokens)
    if not causal:
        return SeenKeys((every,), (), ())
    if order.name == "contiguous":
        return SeenKeys((), (every,), ())
    if order.name == "zigzag":
        half = tokens // 2
        first = Rectangle.of_slices(tokens, keys=slice(0, half))
        second = Rectangle.of_slices(tokens, queries=slice(half, tokens))
        return SeenKeys((), (first,), (second,))
    part = order.part_of(tokens)
    same = slice(0, part)
    return SeenKeys(
        tuple(_triangle(tokens // part, part)),
        (Rectangle(0, tokens // part, part, same, same),),
        (),
    )


def _triangle(count: int, part: int) -> list[Rectangle]:
    """All parts before each of `count` parts."""
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
