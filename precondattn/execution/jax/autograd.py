"""JAX: a backend's forward and backward as one `jax.custom_vjp` function, and so its steps.

Piece and backend are static. The arrays of the frame have no gradient. vmap, jit and grad compose
as for any JAX function; forward-mode differentiation is refused by JAX itself. The forward pass and
the gradient have derivatives in any mode (`second_derivative.py`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

from precondattn.arrays import Array, Arrays, dtype_name, upcast
from precondattn.cache import Replace
from precondattn.dispatch.plan import PlannedCall
from precondattn.execution.cotangents import gradients_at, step_gradients_at
from precondattn.execution.jax.backend import JaxBackend
from precondattn.execution.jax.second_derivative import with_derivatives
from precondattn.frame import Frame, UnmaskedFrame

jax.tree_util.register_pytree_node(
    Frame, lambda frame: (frame.arrays, None), lambda _, arrays: Frame(*arrays)
)
jax.tree_util.register_pytree_node(
    UnmaskedFrame,
    lambda frame: ((), (frame.t, frame.s)),
    lambda sizes, _: UnmaskedFrame(sizes[0], sizes[1], jax.numpy.zeros(())),
)


def apply(planned: PlannedCall, inputs: dict[str, Array], frame: Frame) -> Array:
    """The output of a planned call, differentiable in its inputs."""
    return _apply(planned, inputs, frame)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(planned: PlannedCall, inputs: dict[str, Array], frame: Frame) -> Array:
    return _wide(planned.backend.forward(planned.piece, inputs, frame)[0])


def _forward(planned: PlannedCall, inputs: dict[str, Array], frame: Frame) -> Any:
    out, residuals = _methods(planned).forward(planned.piece, inputs, frame)
    return _wide(out), (inputs, frame, out, residuals)


def _backward(planned: PlannedCall, saved: Any, cotangent: Array) -> Any:
    inputs, frame, out, residuals = saved
    gradients = gradients_at(
        cotangent, _methods(planned), planned.piece, inputs, frame, out, residuals
    )
    cotangents = {name: gradients[name].astype(array.dtype) for name, array in inputs.items()}
    return cotangents, jax.tree.map(_no_cotangent, frame)


class _WithDerivatives:
    """Outputs and gradients of a backend whose methods JAX may not differentiate."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def forward(self, piece: Any, *arrays: Any) -> Any:
        return with_derivatives("forward", self.backend, self.backend.forward, piece)(*arrays)

    def backward(self, piece: Any, *arrays: Any) -> Any:
        return with_derivatives("backward", self.backend, self.backend.backward, piece)(*arrays)

    def step(self, piece: Any, *arrays: Any) -> Any:
        return with_derivatives("step", self.backend, self.backend.step, piece)(*arrays)

    def step_backward(self, piece: Any, *arrays: Any) -> Any:
        method = self.backend.step_backward
        return with_derivatives("step_backward", self.backend, method, piece)(*arrays)


def _methods(planned: PlannedCall) -> Any:
    backend = planned.backend
    return backend if isinstance(backend, JaxBackend) else _WithDerivatives(backend)


def _wide(out: Array) -> Array:
    """The output; that in float16 in float32, so that its cotangent is (`cotangents.py`)."""
    return upcast(out) if dtype_name(out) == "float16" else out


def _no_cotangent(array: Array) -> Any:
    """The cotangent of an integer or boolean array, which has dtype float0."""
    return np.zeros(array.shape, dtype=jax.dtypes.float0)


_apply.defvjp(_forward, _backward)


def apply_step(
    planned: PlannedCall, past: dict[str, Array], inputs: dict[str, Array], frame: Frame
) -> tuple[Array, dict[str, Replace]]:
    """A step that replaces the states of a cache, differentiable in them and in the inputs."""
    out, new = _step(planned, past, inputs, frame)
    return out, {name: Replace(state) for name, state in new.items()}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _step(
    planned: PlannedCall, past: dict[str, Array], inputs: dict[str, Array], frame: Frame
) -> tuple[Array, Arrays]:
    return _output_and_states(planned.backend.step(planned.piece, past, inputs, frame))


def _output_and_states(result: tuple[Array, Any]) -> tuple[Array, Arrays]:
    out, updates = result
    return _wide(out), {name: update.value for name, update in updates.items()}


def _step_forward(planned: PlannedCall, past: Any, inputs: Any, frame: Frame) -> Any:
    result = _methods(planned).step(planned.piece, past, inputs, frame)
    return _output_and_states(result), (past, inputs, frame)


def _step_backward(planned: PlannedCall, saved: Any, cotangents: Any) -> Any:
    past, inputs, frame = saved
    d_out, d_states = cotangents
    like = next(iter(inputs.values()))  # The step's output has the dtype of the inputs.
    gradients, d_past = step_gradients_at(
        d_out, d_states, _methods(planned), planned.piece, past, inputs, frame, like
    )
    d_inputs = {name: gradients[name].astype(array.dtype) for name, array in inputs.items()}
    d_before = {name: d_past[name].astype(array.dtype) for name, array in past.items()}
    return d_before, d_inputs, jax.tree.map(_no_cotangent, frame)


_step.defvjp(_step_forward, _step_backward)
