"""Names for types that depend on the array library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Array = Any
"""An array of any supported library."""

Arrays = dict[str, Array]

ByName = Mapping[str, Array]

Residuals = tuple[Array, ...]
"""The arrays that a forward pass saves for its gradient, besides inputs and output."""

Shape = tuple[int, ...]

Device = Any
"""A device of any supported library, or its name."""

DType = Any
"""A data type of any supported library."""

Index = Any
"""An index of an array: slices, integers, integer arrays."""

Tree = Any

Namespace = Any
"""The functions of an array library, with the names of the array API standard."""

Token = tuple[Array, ...]
"""The slices of all inputs of a scan for one token."""

Step = Callable[..., Tree]

FromAbove = Any
"""A value whose type is above this folder: a planned or a bound call, a cache, declared inputs."""
