"""The interface of an algorithm, which computes leaves of one class.

Inputs are float32 or float64 in the user's layout, (b, t, h, d). An algorithm modifies none of
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import precondattn as pa
from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.arrays import Array, Arrays, Residuals
from precondattn.backend import ArraySpec
from precondattn.cache import Updates
from precondattn.frame import Frame
from precondattn_portable.arithmetic import Arithmetic

L = TypeVar("L")
"""The class of leaves that an algorithm computes."""


class Algorithm(Generic[L]):
    """A computation of `leaf`. `ops` is the arithmetic of the arrays' library."""

    name = ""
    """The name that `explain` prints."""

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

TOKEN_WISE = frozenset(
    {
        pa.BothDirections,
        pa.ContractionGate,
        pa.Difference,
        pa.EluPlusOne,
        pa.HedgehogMap,
        pa.L2Norm,
        pa.LayerNorm,
        pa.OwnToken,
        pa.RMSNorm,
        pa.ReversedTokens,
        pa.ScaledDims,
        pa.StableBeta,
        pa.StableChannels,
        pa.Tempered,
        pa.UnitRows,
    }
)
"""Leaves whose definition is linear in memory, and can be traced and compiled: its control flow
does not depend on array entries."""


class AsDefined(Algorithm[LeafProtocol]):
    """The leaf's definition, by its own methods."""

    name = "as defined"

    def __init__(self, ops: Arithmetic, leaf: LeafProtocol) -> None:
        super().__init__(ops, leaf)
        for method in ("forward", "backward", "step", "step_backward"):
            setattr(self, method, getattr(leaf, method))
