"""The declared parameters of recipes: their shapes in letters, and their initial distributions.

A shape is a text such as `"x 16"` or `"16 …"`, with these letters:

====  =================================================================
x     width of the hidden states
…     the axes of the computed input, without batch and time
d, e  width of keys and of values
h, u  heads of queries and of values
4     a fixed size
====  =================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from precondattn.algebra.declaration import FIXED, Axis, Pattern
from precondattn.arrays import Array, Shape, namespace

MODEL, REST = "x", "…"


class Draw(Protocol):
    """A source of new arrays with the dtype of one parameter, from a framework."""

    def normal(self, shape: Shape) -> Array:
        """An array of independent draws from the standard normal distribution."""

    def uniform(self, shape: Shape) -> Array:
        """An array of independent draws from the uniform distribution between 0 and 1."""

    def constant(self, shape: Shape, value: float) -> Array:
        """An array with `value` in every entry."""

    def identity(self, shape: Shape) -> Array:
        """Identity matrices in the last two axes."""


FirstValues = Callable[[Draw, Shape], Array]
"""The initial distribution of a parameter."""


class Parameter(NamedTuple):
    """The declaration of one parameter: its shape and its initial distribution.

    If `summed` is not 0, it is the weight of a linear map, which is a module of the layer. Then
    `p[name]` can only be passed to `linear`.
    """

    shape: str
    start: FirstValues
    summed: int = 0
    """The number of first axes that the linear map sums over; 0 for other parameters."""
    bias: str = ""
    """The name of the linear map's bias parameter; empty without a bias."""

    def axes(self, pattern: Pattern, widths: Mapping[str, Axis]) -> tuple[Axis, ...]:
        """The axes in the mechanism's letters, for the input that `pattern` declares."""
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
    """The constant `value` in every entry."""

    value: float

    def __call__(self, draw: Draw, shape: Shape) -> Array:
        return draw.constant(shape, self.value)


@dataclass(frozen=True)
class Normal:
    """The normal distribution N(0, deviation²)."""

    deviation: float

    def __call__(self, draw: Draw, shape: Shape) -> Array:
        return self.deviation * draw.normal(shape)


@dataclass(frozen=True)
class FanIn:
    """The normal distribution N(0, 1/n), with n the size of the first `axes` axes of a weight."""

    axes: int = 1

    def __call__(self, draw: Draw, shape: Shape) -> Array:
        return math.prod(shape[: self.axes]) ** -0.5 * draw.normal(shape)


@dataclass(frozen=True)
class UniformFanIn:
    """The uniform distribution U(−1/√n, 1/√n), n the first size; PyTorch's convolutions use it."""

    def __call__(self, draw: Draw, shape: Shape) -> Array:
        return shape[0] ** -0.5 * (2 * draw.uniform(shape) - 1)


@dataclass(frozen=True)
class LogUniform:
    """The logarithm of a variable with the uniform distribution U(low, high)."""

    low: float
    high: float

    def __call__(self, draw: Draw, shape: Shape) -> Array:
        x = self.low + (self.high - self.low) * draw.uniform(shape)
        return namespace(x).log(x)


@dataclass(frozen=True)
class InverseSoftplus:
    """The value softplus⁻¹(Δ), where log Δ is uniform between log `low` and log `high`."""

    low: float
    high: float

    def __call__(self, draw: Draw, shape: Shape) -> Array:
        span = math.log(self.high) - math.log(self.low)
        step = namespace(u := draw.uniform(shape)).exp(math.log(self.low) + span * u)
        return step + namespace(step).log(-namespace(step).expm1(-step))


@dataclass(frozen=True)
class Spaced:
    """Equally spaced values from `start` to `end` along the only axis."""

    start: float
    end: float

    def __call__(self, draw: Draw, shape: Shape) -> Array:
        ones = draw.constant(shape, 1.0)
        index = namespace(ones).cumulative_sum(ones, axis=0) - 1
        return self.start + (self.end - self.start) / max(shape[0] - 1, 1) * index


@dataclass(frozen=True)
class Identity:
    """Identity matrices in the last two axes."""

    def __call__(self, draw: Draw, shape: Shape) -> Array:
        return draw.identity(shape)


def linear_map(shape: str, *, bias: bool = False) -> dict[str, Parameter]:
    """The parameters `weight` and `bias` of W x + b, with W of a shape such as `"x …"`."""
    if not bias:
        return {"weight": Parameter(shape, FanIn(), 1)}
    _, _, outer = shape.partition(" ")
    return {
        "weight": Parameter(shape, FanIn(), 1, "bias"),
        "bias": Parameter(outer, Constant(0)),
    }


def low_rank_maps(rank: str, *, bias: bool = False) -> dict[str, Parameter]:
    """The parameters `down`, `up` and `bias` of B A x + b, where A x has `rank` channels."""
    down = Parameter(f"x {rank}", FanIn(), 1)
    up = Parameter(f"{rank} …", FanIn(), 1, "bias" if bias else "")
    maps = {"down": down, "up": up}
    return {**maps, "bias": Parameter("…", Constant(0))} if bias else maps


Weights = Mapping[str, Mapping[str, Any]]
"""The parameters of a layer, by input and by name in the input's recipe."""
