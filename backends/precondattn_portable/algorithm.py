"""What an algorithm is: how a backend computes one kind of leaf.

Inputs come in float32 or float64, laid out as the user gave them, (b, t, h, d). An algorithm
writes to none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from precondattn.arrays import Array
from precondattn.backend import ArraySpec, Request
from precondattn.cache import Updates
from precondattn.frame import Frame
from precondattn_portable.arithmetic import Arithmetic

Arrays = dict[str, Array]
Residuals = tuple[Array, ...]


class Algorithm:
    """How one kind of leaf is computed. `ops` are the products of the arrays' library."""

    def refuses(self, leaf: Any, request: Request) -> str | None:
        """Why not; None where it does this leaf, whatever its options."""
        return None

    def forward(
        self, ops: Arithmetic, leaf: Any, x: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        """The output, and what `backward` needs besides inputs and output."""
        raise NotImplementedError

    def backward(
        self,
        ops: Arithmetic,
        leaf: Any,
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
        leaf: Any,
        past: Mapping[str, Array],
        x: Mapping[str, Array],
        frame: Frame,
    ) -> tuple[Array, Updates]:
        """The output for new tokens, and the update of every slot in `past`."""
        raise NotImplementedError

    def step_backward(
        self,
        ops: Arithmetic,
        leaf: Any,
        past: Mapping[str, Array],
        x: Mapping[str, Array],
        frame: Frame,
        cotangent: Array,
        d_buffers: Mapping[str, Array],
    ) -> tuple[Arrays, Arrays]:
        """The gradients of inputs and of `past`; for leaves that keep states."""
        raise NotImplementedError

    def residual_shapes(self, leaf: Any, inputs: Mapping[str, ArraySpec]) -> tuple[ArraySpec, ...]:
        """What `forward` gives as residuals."""
        return ()
