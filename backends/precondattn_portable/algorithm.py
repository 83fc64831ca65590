"""The interface of an algorithm: how a backend computes one type of leaf.

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

L = TypeVar("L", contravariant=True)
"""The class of leaves that an algorithm computes."""


class Algorithm(Generic[L]):
    """How one type of leaf is computed. `ops` is the arithmetic of the arrays' library."""

    name = ""
    """What `explain` calls it."""

    def forward(
        self, ops: Arithmetic, leaf: L, x: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        """The output, and the residuals that `backward` needs besides inputs and output."""
        raise NotImplementedError

    def backward(
        self,
        ops: Arithmetic,
        leaf: L,
        x: Mapping[str, Array],
        frame: Frame,
        out: Array,
        residuals: Residuals,
        cotangent: Array,
    ) -> Arrays:
        """The gradient of every input, by name."""
        raise NotImplementedError

    def step(
        self,
        ops: Arithmetic,
        leaf: L,
        past: Mapping[str, Array],
        x: Mapping[str, Array],
        frame: Frame,
    ) -> tuple[Array, Updates]:
        """The output for new tokens, and the update of every slot in `past`."""
        raise NotImplementedError

    def step_backward(
        self,
        ops: Arithmetic,
        leaf: L,
        past: Mapping[str, Array],
        x: Mapping[str, Array],
        frame: Frame,
        cotangent: Array,
        d_buffers: Mapping[str, Array],
    ) -> tuple[Arrays, Arrays]:
        """The gradients of inputs and of `past`, for leaves with a state."""
        raise NotImplementedError

    def residual_shapes(self, leaf: L, inputs: Mapping[str, ArraySpec]) -> tuple[ArraySpec, ...]:
        """Shapes and dtypes of the residuals of `forward`."""
        return ()


AnyAlgorithm = Algorithm[Any]
"""An algorithm of some class of leaves, as a table holds it."""
