"""The interface of an algorithm: how a backend computes a leaf of one type.

Inputs are float32 or float64 in the user's layout, (b, t, h, d). An algorithm modifies none of
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from precondattn.arrays import Array, Arrays, Residuals
from precondattn.backend import ArraySpec
from precondattn.cache import Updates
from precondattn.frame import Frame
from precondattn_portable.arithmetic import Arithmetic

L = TypeVar("L")
"""The class of leaves that an algorithm computes."""


class Algorithm(Generic[L]):
    """How `leaf` is computed. `ops` is the arithmetic of the arrays' library."""

    name = ""
    """What `explain` calls it."""

    def __init__(self, ops: Arithmetic, leaf: L) -> None:
        self.ops, self.leaf = ops, leaf

    def forward(self, x: Arrays, frame: Frame) -> tuple[Array, Residuals]:
        """The output, and the residuals that `backward` needs besides inputs and output."""
        raise NotImplementedError

    def backward(
        self, x: Arrays, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        """The gradient of every input, by name."""
        raise NotImplementedError

    def step(self, past: Arrays, x: Arrays, frame: Frame) -> tuple[Array, Updates]:
        """The output for new tokens, and the update of every slot in `past`."""
        raise NotImplementedError

    def step_backward(
        self, past: Arrays, x: Arrays, frame: Frame, cotangent: Array, d_buffers: Arrays
    ) -> tuple[Arrays, Arrays]:
        """The gradients of inputs and of `past`, for leaves with a state."""
        raise NotImplementedError

    def residual_shapes(self, inputs: Mapping[str, ArraySpec]) -> tuple[ArraySpec, ...]:
        """Shapes and dtypes of the residuals of `forward`."""
        return ()


AnyAlgorithm = Algorithm[Any]
"""An algorithm of some leaf."""
