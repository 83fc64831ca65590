"""The linear maps of a layer, which are separate modules such as `q_proj`.

A recipe declares a weight W by its axes (x, h, d), summed axes first. The modules of both
frameworks store matrices: `nn.Linear` (h · d, x), and `nnx.Linear` (x, h · d). Heads are the
slowest axis of the output channels, so that the channels of each head are adjacent, and devices can
divide them.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import NamedTuple

from precondattn.arrays import Array, Shape, namespace
from precondattn.layers.parameters import Draw, FirstValues

HEADS = ("heads", "kv_heads")
"""The usual names of head axes."""


class Weight(NamedTuple):
    """One parameter of a layer."""

    shape: Shape
    start: FirstValues
    names: tuple[str | None, ...]
    """The usual names of its axes, for sharding."""
    grain: tuple[int, ...] = ()
    """The number of adjacent entries along each axis that must stay on one device, such as the rows
    of a head; 1 for each axis if empty."""


class Map(NamedTuple):
    """A linear map y = W x + b, with W and b declared by axes."""

    name: str
    """The name of the map's module."""
    entry: str
    """The value that the map computes, such as an input of the mechanism."""
    weight: str
    """The declared name of W."""
    bias: str
    """The declared name of b; empty without b."""
    inner: tuple[int, ...]
    outer: tuple[int, ...]
    """The sizes of the axes of y; `inner` has those of x."""
    names: tuple[str | None, ...]
    """The usual names of all axes of W."""
    order: tuple[int, ...]
    """The order of y's axes in the module: heads first."""

    @classmethod
    def of_weight(
        cls, name: str, entry: str, weight: str, bias: str, summed: int, declared: Weight
    ) -> Map:
        """The map of a declared weight W, whose first axes are summed over."""
        inner, outer = declared.shape[:summed], declared.shape[summed:]
        names = declared.names[summed:]
        order = tuple(sorted(range(len(outer)), key=lambda axis: names[axis] not in HEADS))
        return cls(name, entry, weight, bias, inner, outer, declared.names, order)

    def stored(self, array: Array, *, is_bias: bool = False, outer_first: bool = False) -> Array:
        """The module's matrix (inner, outer) from W, or (outer, inner); its vector from b."""
        xp, count = namespace(array), 0 if is_bias else len(self.inner)
        axes = (*range(count), *(count + axis for axis in self.order))
        shape = (prod(self.inner),) * (not is_bias) + (prod(self.outer),)
        array = xp.reshape(xp.permute_dims(array, axes), shape)
        return array.T if outer_first and not is_bias else array

    def parameter(
        self, start: FirstValues, *, is_bias: bool = False, outer_first: bool = False
    ) -> Weight:
        """The parameter of the module, whose initial values are drawn with the declared axes."""
        of_x = (prod(self.inner), self.names[0], prod(self.inner[1:]))
        of_y: tuple[int, str | None, int] = (1, None, 1)
        if self.outer:
            slowest = self.order[0]
            name = self.names[len(self.inner) + slowest]
            of_y = (prod(self.outer), name, prod(self.outer) // self.outer[slowest])
        axes = [of_y] if is_bias else [of_y, of_x] if outer_first else [of_x, of_y]
        sizes, usual, grains = zip(*axes, strict=True)
        drawn = partial(self._drawn, start, is_bias, outer_first)
        return Weight(sizes, drawn, usual, grains)

    def _drawn(
        self, start: FirstValues, is_bias: bool, outer_first: bool, draw: Draw, shape: Shape
    ) -> Array:
        declared = self.outer if is_bias else (*self.inner, *self.outer)
        return self.stored(start(draw, declared), is_bias=is_bias, outer_first=outer_first)

    def joined(self, x: Array) -> Array:
        """x with its summed axes flattened (…, inner), which the module reads."""
        if len(self.inner) == 1:
            return x
        return namespace(x).reshape(x, (*x.shape[: x.ndim - len(self.inner)], prod(self.inner)))

    def split(self, y: Array) -> Array:
        """The output (…, outer) of the module, with the declared axes of y."""
        if len(self.outer) == 1:
            return y
        xp, before = namespace(y), y.ndim - 1
        sizes = tuple(self.outer[axis] for axis in self.order)
        y = xp.reshape(y, (*y.shape[:-1], *sizes))
        if self.order == tuple(range(len(self.outer))):
            return y
        back = (before + self.order.index(axis) for axis in range(len(self.outer)))
        return xp.permute_dims(y, (*range(before), *back))
