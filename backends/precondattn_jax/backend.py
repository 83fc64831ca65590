"""The JAX backend: which leaves are computed by which algorithm.

A call of a leaf is one compiled function: outside `jax.jit` it is compiled once for its shapes;
inside, it is part of the surrounding computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from precondattn.arrays import Array, Arrays, Residuals
from precondattn.backend import Request, Support
from precondattn.cache import Updates
from precondattn.frame import Frame
from precondattn_portable.algorithm import Algorithm
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.backend import Portable


class Jax(Portable):
    """Blocked algorithms in loops, on any device."""

    name = "jax"
    libraries = frozenset({"jax"})
    preference = 10
    segments_as_batch = False

    def arithmetic(self, like: Array) -> Arithmetic:
        from precondattn_jax.arithmetic import JAX

        return JAX

    def algorithm(self, leaf: Any) -> Algorithm | None:
        """The algorithm for a leaf; None where this backend has none."""
        from precondattn_jax.algorithms import algorithm_of

        return algorithm_of(leaf)

    def supports(self, mechanism: Any, request: Request) -> Support:
        if len(mechanism.program.calls) > 1:
            return Support.no("runs the leaves of this group one by one")
        return super().supports(mechanism, request)

    def forward(
        self, mechanism: Any, inputs: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        return self._compiled("forward", mechanism, dict(inputs), frame)

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
        return self._compiled("backward", mechanism, *arrays)

    def step(
        self,
        mechanism: Any,
        past: Mapping[str, Array],
        inputs: Mapping[str, Array],
        frame: Frame,
    ) -> tuple[Array, Updates]:
        return self._compiled("step", mechanism, dict(past), dict(inputs), frame)

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
        return self._compiled("step_backward", mechanism, *arrays)

    def _compiled(self, verb: str, mechanism: Any, *arrays: Any) -> Any:
        from precondattn_jax.compiled import compiled

        return compiled(verb, self, mechanism, *arrays)
