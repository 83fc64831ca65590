"""JAX: second derivatives, those of a backend's methods.

JAX can not differentiate a kernel, and has no reverse mode of a loop whose length is known at run
time only. So the methods are differentiated as what they compute: `forward` as an output F(x) in
operations that JAX can differentiate any number of times, and `backward` as the vjp of F. A backend
of JAX may have such an F of its own, linear in memory; otherwise F is the definition.

Output and residuals are functions of the inputs. What `backward` computes depends on the inputs and
the cotangent only, and its derivative includes this dependence.

So it is with a step: `step` is differentiated as a function of the buffers and the inputs to the
output and the updates, and `step_backward` as the vjp of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from precondattn.algebra.piece import Piece
from precondattn.arrays import Array, Tree, cast, upcast_all
from precondattn.cache import Updates
from precondattn.dispatch.discovery import discover
from precondattn.execution.jax.backend import JaxBackend, Output, StepOutput
from precondattn.execution.jax.derivative import with_derivative
from precondattn.frame import Frame


def with_derivatives(verb: str, backend: Tree, function: Callable[..., Tree], piece: Piece) -> Tree:
    """A function of a backend that runs a piece, with its derivatives."""
    if verb in ("forward", "backward"):
        output = output_of(piece, backend)
        return _forward(function, output) if verb == "forward" else _backward(function, output)
    if differentiates_step(backend, piece):
        return function
    step = step_of(piece)
    return _step(function, step) if verb == "step" else _step_backward(function, step)


def differentiates_step(backend: Tree, piece: Piece) -> bool:
    """Whether JAX can differentiate the steps of a backend by itself, any number of times."""
    return isinstance(backend, JaxBackend) and backend.differentiable_step(piece) is not None


def output_of(piece: Piece, first: Tree) -> Output:
    """F of a piece: that of a backend, `first` if it has one, or the definition."""
    for backend in (first, *discover().backends):
        output = backend.differentiable(piece) if isinstance(backend, JaxBackend) else None
        if output is not None:
            return output
    return lambda inputs, frame: _defined(piece, inputs, frame)


def step_of(piece: Piece) -> StepOutput:
    """The step of a piece: that of a backend, or the definition."""
    for backend in discover().backends:
        step = backend.differentiable_step(piece) if isinstance(backend, JaxBackend) else None
        if step is not None:
            return step
    # It is computed again when it is differentiated, because it stores all pairs of tokens.
    defined: StepOutput = jax.checkpoint(partial(_defined_step, piece))
    return defined


def _defined(piece: Piece, inputs: Mapping[str, Array], frame: Frame) -> Array:
    """The output by the definition of each leaf."""
    values = dict(inputs)
    for call in piece.program.calls:
        x = upcast_all({formal: values[value] for formal, value in call.arguments})
        values[call.out] = call.leaf.forward(x, frame)[0]
    return values[piece.program.out]


def _defined_step(
    piece: Piece, past: Mapping[str, Array], inputs: Mapping[str, Array], frame: Frame
) -> tuple[Array, Updates]:
    """The output and the updates by the definition of each leaf."""
    values, updates = dict(inputs), dict[str, Any]()
    for call in piece.program.calls:
        keys = call.slot_keys()
        x = upcast_all({formal: values[value] for formal, value in call.arguments})
        buffers = upcast_all({slot: past[key] for slot, key in keys.items()})
        values[call.out], new = call.leaf.step(buffers, x, frame)
        for slot, key in keys.items():
            updates.setdefault(key, new[slot])
    return values[piece.program.out], updates


def _forward(method: Callable[..., Tree], output: Output) -> Tree:
    """The output and the residuals, which only `backward` reads: their tangent is 0."""

    def plain(inputs: dict[str, Array], frame: Frame) -> Tree:
        return method(inputs, frame)

    def derivative(primals: Tree, tangents: Tree) -> Tree:
        inputs, frame = primals
        out, residuals = forward(inputs, frame)
        _, d_out = jax.jvp(lambda x: output(x, frame), *_wide(inputs, tangents[0]))
        return (out, residuals), (cast(d_out, out.dtype), jax.tree.map(_no_tangent, residuals))

    forward = with_derivative(plain, derivative)
    return forward


def _backward(method: Callable[..., Tree], output: Output) -> Tree:
    """The gradients by name."""

    def plain(inputs: Tree, frame: Frame, out: Array, residuals: Tree, cotangent: Array) -> Tree:
        return method(inputs, frame, out, residuals, cotangent)

    def derivative(primals: Tree, tangents: Tree) -> Tree:
        inputs, frame, *_, cotangent = primals
        gradients = backward(*primals)

        def pulled(x: Tree, cotangent: Tree) -> Tree:
            out, pull = jax.vjp(lambda x: output(x, frame), x)
            return pull(cast(cotangent["out"], out.dtype))[0]

        x, d_x = _wide(inputs, tangents[0])
        given, d_given = _wide({"out": cotangent}, {"out": tangents[4]})
        _, d_gradients = jax.jvp(pulled, (*x, *given), (*d_x, *d_given))
        return gradients, {name: cast(d_gradients[name], g.dtype) for name, g in gradients.items()}

    backward = with_derivative(plain, derivative)
    return backward


def _step(method: Callable[..., Tree], output: StepOutput) -> Tree:
    """The output and the updates by name."""

    def plain(past: Tree, inputs: Tree, frame: Frame) -> Tree:
        return method(past, inputs, frame)

    def derivative(primals: Tree, tangents: Tree) -> Tree:
        past, inputs, frame = primals
        result = step(*primals)
        wide, d_wide = (tuple(map(upcast_all, each)) for each in ((past, inputs), tangents[:2]))
        _, moved = jax.jvp(lambda past, x: output(past, x, frame), wide, d_wide)
        return result, jax.tree.map(_cast_like, moved, result)

    step = with_derivative(plain, derivative)
    return step


def _step_backward(method: Callable[..., Tree], output: StepOutput) -> Tree:
    """The gradients of the inputs, and those of the old states, by name."""

    def plain(past: Tree, inputs: Tree, frame: Frame, cotangent: Array, d_new: Tree) -> Tree:
        return method(past, inputs, frame, cotangent, d_new)

    def derivative(primals: Tree, tangents: Tree) -> Tree:
        past, inputs, frame, cotangent, d_new = primals
        gradients = step_backward(*primals)

        def states(past: Tree, x: Tree) -> Tree:
            out, updates = output(past, x, frame)
            replaced: dict[str, Tree] = dict(updates)
            return out, {name: update.value for name, update in replaced.items()}

        def pulled(past: Tree, x: Tree, given: Tree, d_new: Tree) -> Tree:
            result, pull = jax.vjp(states, past, x)
            d_past, d_x = pull(jax.tree.map(_cast_like, (given["out"], d_new), result))
            return d_x, d_past

        arguments = past, inputs, {"out": cotangent}, d_new
        moving = tangents[0], tangents[1], {"out": tangents[3]}, tangents[4]
        wide, d_wide = (tuple(map(upcast_all, each)) for each in (arguments, moving))
        _, d_gradients = jax.jvp(pulled, wide, d_wide)
        return gradients, jax.tree.map(_cast_like, d_gradients, gradients)

    step_backward = with_derivative(plain, derivative)
    return step_backward


def _cast_like(array: Array, other: Array) -> Array:
    return cast(array, other.dtype)


def _wide(arrays: Mapping[str, Array], tangents: Mapping[str, Array]) -> tuple[Tree, Tree]:
    """The arguments of `jax.jvp`: both in float32, where they are in half precision."""
    return (upcast_all(arrays),), (upcast_all(tangents),)


def _no_tangent(array: Array) -> Tree:
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    return jnp.zeros_like(array) if is_float else np.zeros(array.shape, dtype=jax.dtypes.float0)
