"""Declared parameters of a recipe: shapes by letters, and the distribution of their first values.

A shape is a text such as `"x 16"` or `"16 …"`:

====  =================================================================
x     width of the hidden states
…     the axes of the input that is made, without batch and time
d, e  width of keys and of values
h, u  heads of queries and of values
4     a fixed size
====  =================================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from precondattn.algebra.declaration import FIXED, Axis, Pattern
from precondattn.arrays import Array, Shape, namespace

MODEL, REST = "x", "…"


class Draw(Protocol):
    """New arrays of the shape and dtype of one parameter, made by a framework."""

    def normal(self) -> Array:
        """Independent draws of a standard normal distribution."""

    def uniform(self) -> Array:
        """Independent draws between 0 and 1."""

    def constant(self, value: float) -> Array:
        """The same number everywhere."""

    def identity(self) -> Array:
        """Identity matrices in the last two axes."""

    def of_shape(self, shape: Shape) -> Draw:
        """Draws of arrays of another shape."""


class FirstValues(Protocol):
    """The distribution of a parameter's first values."""

    def __call__(self, draw: Draw, shape: Shape) -> Array: ...


class Parameter(NamedTuple):
    """One array of weights: its shape, and how it starts.

    With `summed`, it is the weight of a linear map over its first axes, which is a module of the
    layer: `p[name]` can then be given to `linear`, and to nothing else.
    """

    shape: str
    start: FirstValues
    summed: int = 0
    """How many of its axes the linear map sums over; 0 for an array that is no linear map."""
    bias: str = ""
    """The name of the parameter that the linear map adds."""

    def axes(self, pattern: Pattern, widths: Mapping[str, Axis]) -> tuple[Axis, ...]:
        """Its axes, in letters of the mechanism, for the input that `pattern` declares."""
        axes: list[Axis] = []
        for word in self.shape.split():
            if word == REST:
                axes += [a for a in pattern.axes if a.letter not in "bts"]
            elif word.isdecimal():
                axes.append(Axis(FIXED, int(word)))
            else:
                axes.append(widths[word])
        return tuple(axes)


@dataclass(frozen=True)
class Constant:
    """Every entry is `value`."""

    value: float

    def __call__(self, draw: Draw, shape: Shape) -> Array:
        return draw.constant(self.value)


@dataclass(frozen=True)
class Normal:
    """N(0, deviation²)."""

    deviation: float

    def __call__(self, draw: Draw, shape: Shape) -> Array:
        return self.deviation * draw.normal()


@dataclass(frozen=True)
class FanIn:
    """N(0, 1/n), with n the number of terms that are summed: the first `axes` axes of a weight."""

    axes: int = 1

    def __call__(self, draw: Draw, shape: Shape) -> Array:
        return math.prod(shape[: self.axes]) ** -0.5 * draw.normal()


@dataclass(frozen=True)
class UniformFanIn:
    """U(−1/√n, 1/√n), with n the size of the first axis, as PyTorch's convolutions start."""

    def __call__(self, draw: Draw, shape: Shape) -> Array:
        return shape[0] ** -0.5 * (2 * draw.uniform() - 1)


@dataclass(frozen=True)
class LogUniform:
    """log of U(low, high)."""

    low: float
    high: float

    def __call__(self, draw: Draw, shape: Shape) -> Array:
        x = self.low + (self.high - self.low) * draw.uniform()
        return namespace(x).log(x)


@dataclass(frozen=True)
class InverseSoftplus:
    """softplus⁻¹(Δ), with log Δ uniform between log `low` and log `high`."""

    low: float
    high: float

    def __call__(self, draw: Draw, shape: Shape) -> Array:
        span = math.log(self.high) - math.log(self.low)
        step = namespace(u := draw.uniform()).exp(math.log(self.low) + span * u)
        return step + namespace(step).log(-namespace(step).expm1(-step))


@dataclass(frozen=True)
class Spaced:
    """Equally far apart from `first` to `last`, along the only axis."""

    first: float
    last: float

    def __call__(self, draw: Draw, shape: Shape) -> Array:
        ones = draw.constant(1.0)
        index = namespace(ones).cumulative_sum(ones, axis=0) - 1
        return self.first + (self.last - self.first) / max(shape[0] - 1, 1) * index


@dataclass(frozen=True)
class Identity:
    """Identity matrices in the last two axes."""

    def __call__(self, draw: Draw, shape: Shape) -> Array:
        return draw.identity()


def linear_map(shape: str, *, bias: bool = False) -> dict[str, Parameter]:
    """The parameters of W x + b, with W of a shape such as `"x …"`: `weight`, and `bias`."""
    if not bias:
        return {"weight": Parameter(shape, FanIn(), 1)}
    _, _, outer = shape.partition(" ")
    return {
        "weight": Parameter(shape, FanIn(), 1, "bias"),
        "bias": Parameter(outer, Constant(0)),
    }


def low_rank_maps(rank: str, *, bias: bool = False) -> dict[str, Parameter]:
    """The parameters of B A x + b, with A x of that many channels: `down`, `up`, and `bias`."""
    down = Parameter(f"x {rank}", FanIn(), 1)
    up = Parameter(f"{rank} …", FanIn(), 1, "bias" if bias else "")
    maps = {"down": down, "up": up}
    return {**maps, "bias": Parameter("…", Constant(0))} if bias else maps


Weights = Mapping[str, Mapping[str, Any]]
"""The parameters of a layer: by input, and by their names in its recipe."""
