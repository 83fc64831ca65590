"""JAX: a backend's `forward` and `backward`, or its steps, as one `jax.custom_vjp` function.

Piece and backend are static. The arrays of the frame have no gradient. `vmap`, `jit` and `grad`
compose as for any JAX function; JAX itself refuses forward-mode differentiation. The forward pass
and the gradient can be differentiated in any mode (`second_derivative.py`).
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import jax

from precondattn.arrays import Array, Arrays, Tree, dtype_name, upcast
from precondattn.dispatch.plan import PlannedCall
from precondattn.execution.cotangents import gradients_at, step_gradients_at
from precondattn.frame import Frame, rebuilt
from precondattn.frameworks.jax.backend import JaxBackend
from precondattn.frameworks.jax.derivative import no_tangent
from precondattn.frameworks.jax.second_derivative import with_derivatives

jax.tree_util.register_pytree_node(
    Frame,
    lambda frame: (frame.sources, frame.layout),
    lambda layout, arrays: rebuilt(layout, arrays, None if arrays else jax.numpy.zeros(())),
)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def apply(planned: PlannedCall, inputs: Arrays, frame: Frame) -> Array:
    """The output of a planned call, differentiable with respect to its inputs."""
    return _wide(planned.runner.forward(inputs, frame)[0])


def _forward(planned: PlannedCall, inputs: Arrays, frame: Frame) -> Tree:
    out, residuals = _methods(planned).forward(inputs, frame)
    return _wide(out), (inputs, frame, out, residuals)


def _backward(planned: PlannedCall, saved: Tree, cotangent: Array) -> Tree:
    inputs, frame, *_ = saved
    gradients = gradients_at(cotangent, _methods(planned), *saved)
    return _cast_as(inputs, gradients), jax.tree.map(no_tangent, frame)


apply.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def apply_step(planned: PlannedCall, *arrays: Tree) -> Tree:
    """A step that replaces states, differentiable with respect to the states and the inputs."""
    out, updates = planned.runner.step(*arrays)
    return _wide(out), updates


def _step_forward(planned: PlannedCall, *saved: Tree) -> Tree:
    out, updates = _methods(planned).step(*saved)
    return (_wide(out), updates), saved


def _step_backward(planned: PlannedCall, saved: Tree, cotangents: Tree) -> Tree:
    past, inputs, frame = saved
    d_out, d_updates = cotangents
    d_new = {name: d_update.value for name, d_update in d_updates.items()}
    like = next(iter(inputs.values()))  # The step's output has the dtype of the inputs.
    d_inputs, d_past = step_gradients_at(d_out, d_new, _methods(planned), past, inputs, frame, like)
    return _cast_as(past, d_past), _cast_as(inputs, d_inputs), jax.tree.map(no_tangent, frame)


apply_step.defvjp(_step_forward, _step_backward)


def _methods(planned: PlannedCall) -> Tree:
    """The methods that run a call; those of a `JaxBackend` have derivatives of their own."""
    if isinstance(planned.backend, JaxBackend):
        return planned.runner
    methods = {
        verb: with_derivatives(verb, planned.backend, getattr(planned.runner, verb), planned.piece)
        for verb in ("forward", "backward", "step", "step_backward")
    }
    return SimpleNamespace(**methods)


def _wide(out: Array) -> Array:
    """The output, in float32 in place of float16, for its cotangent's sake (`cotangents.py`)."""
    return upcast(out) if dtype_name(out) == "float16" else out


def _cast_as(arrays: Arrays, gradients: Arrays) -> Arrays:
    return {name: gradients[name].astype(array.dtype) for name, array in arrays.items()}
