"""A backend whose pieces have kernels of their own: it looks them up, and hands the work on."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from precondattn.arrays import Array, Arrays, Residuals
from precondattn.backend import ArraySpec, Backend, Request, Support
from precondattn.cache import Updates
from precondattn.frame import Frame

VERBS = {"forward": "forward", "vjp": "backward", "extend": "step", "extend_vjp": "step_backward"}
"""The method that answers a verb."""


class KernelBackend(Backend):
    """Subclass it with `refusal` and `kernels`.

    What `kernels` finds for a leaf or group has the methods of a backend that it can answer.
    """

    def refusal(self, mechanism: Any, request: Request) -> str | None:
        """Why it does not take this; None where it does."""
        raise NotImplementedError

    def kernels(self, mechanism: Any) -> Any:
        """What computes a leaf or group; None where nothing does."""
        raise NotImplementedError

    def at_work(self, inputs: Mapping[str, Array]) -> AbstractContextManager[Any]:
        """What has to hold while kernels are launched on these inputs."""
        return nullcontext()

    def supports(self, mechanism: Any, request: Request) -> Support:
        reason = self.refusal(mechanism, request)
        return Support.yes() if reason is None else Support.no(reason)

    def forward(
        self, mechanism: Any, inputs: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        with self.at_work(inputs):
            found: tuple[Array, Residuals] = self.kernels(mechanism).forward(
                mechanism, inputs, frame
            )
            return found

    def backward(
        self,
        mechanism: Any,
        inputs: Mapping[str, Array],
        frame: Frame,
        out: Array,
        residuals: Residuals,
        cotangent: Array,
    ) -> Arrays:
        with self.at_work(inputs):
            found: Arrays = self.kernels(mechanism).backward(
                mechanism, inputs, frame, out, residuals, cotangent
            )
            return found

    def step(
        self,
        mechanism: Any,
        past: Mapping[str, Array],
        inputs: Mapping[str, Array],
        frame: Frame,
    ) -> tuple[Array, Updates]:
        with self.at_work(inputs):
            found: tuple[Array, Updates] = self.kernels(mechanism).step(
                mechanism, past, inputs, frame
            )
            return found

    def step_backward(
        self,
        mechanism: Any,
        past: Mapping[str, Array],
        inputs: Mapping[str, Array],
        frame: Frame,
        cotangent: Array,
        d_buffers: Mapping[str, Array],
    ) -> tuple[Arrays, Arrays]:
        with self.at_work(inputs):
            found: tuple[Arrays, Arrays] = self.kernels(mechanism).step_backward(
                mechanism, past, inputs, frame, cotangent, d_buffers
            )
            return found

    def residual_shapes(
        self, mechanism: Any, inputs: Mapping[str, ArraySpec], frame: Frame
    ) -> tuple[ArraySpec, ...]:
        found: tuple[ArraySpec, ...] = self.kernels(mechanism).residual_shapes(mechanism, inputs)
        return found
