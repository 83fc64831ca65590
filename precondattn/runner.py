"""What runs a piece: a backend's answer to a request that it supports.

A plan is made for the first of many calls. It keeps a runner for each of its pieces, so that a call
looks nothing up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from precondattn.arrays import Array
from precondattn.cache import Updates
from precondattn.frame import Frame

if TYPE_CHECKING:
    from precondattn.arrays import Arrays, Residuals
    from precondattn.backend import ArraySpec

METHODS = (
    "forward",
    "forward_with_residuals",
    "backward",
    "residuals_from_lse",
    "step",
    "step_backward",
    "residual_shapes",
)


class Runner(Protocol):
    """The methods of `Backend`, for one piece: each is described there."""

    @property
    def algorithm(self) -> str:
        """Its name, which `explain` shows; empty where the backend has one algorithm only."""

    @property
    def differentiable(self) -> bool:
        """`Support.differentiable`."""

    def forward(self, inputs: Mapping[str, Array], frame: Frame, /) -> tuple[Array, Residuals]: ...

    def forward_with_residuals(
        self, inputs: Mapping[str, Array], frame: Frame, /
    ) -> tuple[Array, Residuals]: ...

    def backward(
        self,
        inputs: Mapping[str, Array],
        frame: Frame,
        out: Array,
        residuals: Residuals,
        cotangent: Array,
        /,
    ) -> Arrays: ...

    def residuals_from_lse(self, lse: Array, /) -> Residuals | None: ...

    def step(
        self, past: Mapping[str, Array], inputs: Mapping[str, Array], frame: Frame, /
    ) -> tuple[Array, Updates]: ...

    def step_backward(
        self,
        past: Mapping[str, Array],
        inputs: Mapping[str, Array],
        frame: Frame,
        cotangent: Array,
        d_buffers: Mapping[str, Array],
        /,
    ) -> tuple[Arrays, Arrays]: ...

    def residual_shapes(
        self, inputs: Mapping[str, ArraySpec], frame: Frame, /
    ) -> tuple[ArraySpec, ...]: ...
