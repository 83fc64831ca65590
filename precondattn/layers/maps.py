"""The linear maps of a layer, which are separate modules such as `q_proj`.

A recipe declares a weight W by its axes (x, h, d), summed axes first. The modules of both
frameworks store matrices: `nn.Linear` (h · d, x), and `nnx.Linear` (x, h · d). Heads are the
slowest axis of the output channels, so that the channels of each head are adjacent, and devices can
divide them.
"""

from __future__ import annotations

from dataclasses import dataclass
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

    def matrix(self, weight: Array) -> Array:
        """W as a matrix (inner, outer)."""
        count = len(self.inner)
        xp = namespace(weight)
        axes = (*range(count), *(count + axis for axis in self.order))
        return xp.reshape(xp.permute_dims(weight, axes), (prod(self.inner), prod(self.outer)))

    def row(self, bias: Array) -> Array:
        """b as a vector."""
        xp = namespace(bias)
        return xp.reshape(xp.permute_dims(bias, self.order), (prod(self.outer),))

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


@dataclass(frozen=True)
class Stored:
    """The storage of a map's W or b in a module: how declared axes become the module's."""

    map: Map
    is_bias: bool = False
    outer_first: bool = False
    """Whether matrices are (outer, inner), as in PyTorch."""

    def __call__(self, array: Array) -> Array:
        if self.is_bias:
            return self.map.row(array)
        matrix = self.map.matrix(array)
        return matrix.T if self.outer_first else matrix

    @property
    def declared_shape(self) -> Shape:
        return self.map.outer if self.is_bias else (*self.map.inner, *self.map.outer)

    def weight(self, start: FirstValues) -> Weight:
        """The parameter of the module, whose initial values are drawn with the declared axes."""
        inner, outer, names = self.map.inner, self.map.outer, self.map.names
        of_x = (prod(inner), names[0], prod(inner[1:]))
        of_y: tuple[int, str | None, int] = (1, None, 1)
        if outer:
            slowest = self.map.order[0]
            of_y = (prod(outer), names[len(inner) + slowest], prod(outer) // outer[slowest])
        axes = [of_y] if self.is_bias else [of_y, of_x] if self.outer_first else [of_x, of_y]
        sizes, usual, grains = zip(*axes, strict=True)
        return Weight(sizes, partial(self._drawn, start), usual, grains)

    def _drawn(self, start: FirstValues, draw: Draw, shape: Shape) -> Array:
        """Initial values that are drawn with the declared axes, and stored as in the module."""
        return self(start(draw.of_shape(self.declared_shape), self.declared_shape))
