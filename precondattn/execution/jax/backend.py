"""The base class of backends for JAX, whose methods are functions of trees of arrays.

`run` says how such a function is called: compiled, and on every device's own part of the arrays.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from precondattn.arrays import Array, Arrays, Residuals
from precondattn.backend import Backend
from precondattn.cache import Updates
from precondattn.frame import Frame

Output = Callable[[Mapping[str, Array], Frame], Array]
"""The output of a mechanism, of its inputs and the frame."""

StepOutput = Callable[[Mapping[str, Array], Mapping[str, Array], Frame], tuple[Array, Updates]]
"""The output and the updates of a step, of the old buffers, the new inputs and the frame."""


class JaxBackend(Backend):
    """Subclass it before the class that computes: `class Jax(JaxBackend, Portable)`."""

    @abstractmethod
    def run(self, verb: str, mechanism: Any, *arrays: Any) -> Any:
        """The result of `self.computing(verb)(mechanism, *arrays)`."""

    def differentiable(self, mechanism: Any) -> Output | None:
        """The output, in operations that JAX can differentiate any number of times.

        None where the backend has none: derivatives of its gradient are then those of another
        backend of JAX, or of the definition, whose memory may be quadratic.
        """
        return None

    def differentiable_step(self, mechanism: Any) -> StepOutput | None:
        """Its step, where that consists of operations that JAX can differentiate any number of
        times; `step_backward` has to consist of such operations then too.

        Otherwise None: `step` and `step_backward` get the derivatives of the step of another
        backend of JAX, or of the definition.
        """
        return None

    def computing(self, verb: str) -> Callable[..., Any]:
        """The method of that name of the class that computes, with its derivatives."""
        method: Callable[..., Any] = getattr(super(), verb)

        def with_derivatives(mechanism: Any, *arrays: Any) -> Any:
            from precondattn.execution.jax import second_derivative

            function = partial(method, mechanism)
            return second_derivative.with_derivatives(verb, self, function, mechanism)(*arrays)

        return with_derivatives

    def forward(
        self, mechanism: Any, inputs: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        out, residuals = self.run("forward", mechanism, dict(inputs), frame)
        return out, residuals

    def backward(
        self,
        mechanism: Any,
        inputs: Mapping[str, Array],
        frame: Frame,
        out: Array,
        residuals: Residuals,
        cotangent: Array,
    ) -> Arrays:
        arrays = (dict(inputs), frame, out, tuple(residuals), cotangent)
        gradients: Arrays = self.run("backward", mechanism, *arrays)
        return gradients

    def step(
        self,
        mechanism: Any,
        past: Mapping[str, Array],
        inputs: Mapping[str, Array],
        frame: Frame,
    ) -> tuple[Array, Updates]:
        out, updates = self.run("step", mechanism, dict(past), dict(inputs), frame)
        return out, updates

    def step_backward(
        self,
        mechanism: Any,
        past: Mapping[str, Array],
        inputs: Mapping[str, Array],
        frame: Frame,
        cotangent: Array,
        d_buffers: Mapping[str, Array],
    ) -> tuple[Arrays, Arrays]:
        arrays = (dict(past), dict(inputs), frame, cotangent, dict(d_buffers))
        gradients, d_past = self.run("step_backward", mechanism, *arrays)
        return gradients, d_past
