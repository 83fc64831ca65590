"""JAX: second derivatives, which are derivatives of a backend's methods.

JAX can not differentiate a kernel, nor differentiate in reverse mode a loop whose length is known
only at run time. So a mathematically equal function is differentiated instead: `forward` as an
output F(x) that JAX can differentiate any number of times, and `backward` as the vjp of F. A JAX
backend may have its own F, with linear memory; otherwise F is the definition.

The same holds for steps. Output and residuals are functions of the inputs, so that the derivative
of `backward`, a function of inputs and cotangent only, includes this dependence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from precondattn.algebra.piece import Piece
from precondattn.arrays import Array, Arrays, Tree, cast, upcast
from precondattn.dispatch.discovery import discover
from precondattn.execution import definition
from precondattn.frame import Frame
from precondattn.frameworks.jax.backend import JaxBackend
from precondattn.frameworks.jax.derivative import with_derivative


def with_derivatives(verb: str, backend: Tree, function: Callable[..., Tree], piece: Piece) -> Tree:
    """A backend's method on a piece, with its derivatives."""
    if verb in ("forward", "backward"):
        output = _offered("differentiable", piece, backend) or partial(definition.output, piece)
        computed = output if verb == "forward" else partial(_backward, output)
    elif differentiates_step(backend, piece):
        return function
    else:
        # Recomputed in the backward pass: the definition stores all pairs of tokens.
        defined = jax.checkpoint(partial(definition.step, piece))
        step = _offered("differentiable_step", piece, backend) or defined
        computed = step if verb == "step" else partial(_step_backward, step)

    def derivative(primals: Tree, tangents: Tree) -> Tree:
        result = differentiable(*primals)
        wide, d_wide = (jax.tree.map(upcast, each) for each in (primals, tangents))
        _, moved = jax.jvp(computed, wide, d_wide)
        if verb == "forward":  # Only `backward` reads the residuals.
            moved = moved, jax.tree.map(jnp.zeros_like, result[1])
        return result, jax.tree.map(_cast_like, moved, result)

    differentiable = with_derivative(function, derivative)
    return differentiable


def differentiates_step(backend: Tree, piece: Piece) -> bool:
    """Whether JAX itself can differentiate the steps of a backend any number of times."""
    return isinstance(backend, JaxBackend) and backend.differentiable_step(piece) is not None


def _offered(method: str, piece: Piece, first: Tree) -> Tree:
    """The differentiable function that a JAX backend offers for a piece, `first` before others."""
    backends = (each for each in (first, *discover().backends) if isinstance(each, JaxBackend))
    offers = (getattr(backend, method)(piece) for backend in backends)
    return next((offer for offer in offers if offer is not None), None)


def _backward(
    output: Tree, inputs: Arrays, frame: Frame, out: Array, residuals: Tree, cotangent: Array
) -> Tree:
    out, pull = jax.vjp(lambda inputs: output(inputs, frame), inputs)
    return pull(cast(cotangent, out.dtype))[0]


def _step_backward(
    step: Tree, past: Arrays, inputs: Arrays, frame: Frame, cotangent: Array, d_new: Arrays
) -> Tree:
    """The gradients of the inputs, and of the old states, by name."""

    def states(past: Arrays, inputs: Arrays) -> Tree:
        out, updates = step(past, inputs, frame)
        replaced: Arrays = dict(updates)
        return out, {name: update.value for name, update in replaced.items()}

    result, pull = jax.vjp(states, past, inputs)
    return pull(jax.tree.map(_cast_like, (cotangent, d_new), result))[::-1]


def _cast_like(array: Array, other: Array) -> Array:
    return cast(array, other.dtype)
