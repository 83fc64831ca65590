"""The base class of backends for JAX, whose methods are functions of trees of arrays.

`run` says how such a function is called: compiled, and on every device's own part of the arrays.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from precondattn.arrays import Array, Arrays, Residuals
from precondattn.backend import Backend
from precondattn.cache import Updates
from precondattn.frame import Frame


class JaxBackend(Backend):
    """Subclass it before the class that computes: `class Jax(JaxBackend, Portable)`."""

    @abstractmethod
    def run(self, verb: str, mechanism: Any, *arrays: Any) -> Any:
        """The result of `self.computing(verb)(mechanism, *arrays)`."""

    def computing(self, verb: str) -> Callable[..., Any]:
        """The method of that name of the class that computes."""
        method: Callable[..., Any] = getattr(super(), verb)
        return method

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
