"""JAX: second derivatives, those of a backend's `forward` and `backward`.

JAX can not differentiate a kernel, and has no reverse mode of a loop whose length is known at run
time only. So both methods are differentiated as what they compute: `forward` as an output F(x) in
operations that JAX can differentiate any number of times, and `backward` as the vjp of F. A backend
of JAX may have such an F of its own, linear in memory; otherwise F is the definition.

Output and residuals are functions of the inputs. What `backward` computes depends on the inputs and
the cotangent only, and its derivative includes this dependence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from precondattn.arrays import Array, cast, upcast_all
from precondattn.dispatch.discovery import discover
from precondattn.execution.jax_backend import JaxBackend, Output
from precondattn.frame import Frame


def with_derivatives(verb: str, backend: Any, method: Callable[..., Any], piece: Any) -> Any:
    """`method(piece, …)`, the `forward` or `backward` of a backend, with its derivatives."""
    with_derivative = _forward if verb == "forward" else _backward
    return with_derivative(lambda *arrays: method(piece, *arrays), output_of(piece, backend))


def output_of(piece: Any, first: Any) -> Output:
    """F of a piece: that of a backend, `first` if it has one, or the definition."""
    for backend in (first, *discover().backends):
        output = backend.differentiable(piece) if isinstance(backend, JaxBackend) else None
        if output is not None:
            return output
    return lambda inputs, frame: _defined(piece, inputs, frame)


def _defined(piece: Any, inputs: Mapping[str, Array], frame: Frame) -> Array:
    """The output by the definition of each leaf."""
    values = dict(inputs)
    for call in piece.program.calls:
        x = upcast_all({formal: values[value] for formal, value in call.arguments})
        values[call.out] = call.leaf.forward(x, frame)[0]
    return values[piece.program.out]


def _forward(method: Callable[..., Any], output: Output) -> Any:
    """The output and the residuals, which only `backward` reads: their tangent is 0."""

    def plain(inputs: dict[str, Array], frame: Frame) -> Any:
        return method(inputs, frame)

    forward: Any = jax.custom_jvp(plain)

    def derivative(primals: Any, tangents: Any) -> Any:
        inputs, frame = primals
        out, residuals = forward(inputs, frame)
        _, d_out = jax.jvp(lambda x: output(x, frame), *_wide(inputs, tangents[0]))
        return (out, residuals), (cast(d_out, out.dtype), jax.tree.map(_no_tangent, residuals))

    forward.defjvp(derivative)
    return forward


def _backward(method: Callable[..., Any], output: Output) -> Any:
    """The gradients by name."""

    def plain(inputs: Any, frame: Frame, out: Array, residuals: Any, cotangent: Array) -> Any:
        return method(inputs, frame, out, residuals, cotangent)

    backward: Any = jax.custom_jvp(plain)

    def derivative(primals: Any, tangents: Any) -> Any:
        inputs, frame, *_, cotangent = primals
        gradients = backward(*primals)

        def pulled(x: Any, cotangent: Any) -> Any:
            out, pull = jax.vjp(lambda x: output(x, frame), x)
            return pull(cast(cotangent["out"], out.dtype))[0]

        x, d_x = _wide(inputs, tangents[0])
        given, d_given = _wide({"out": cotangent}, {"out": tangents[4]})
        _, d_gradients = jax.jvp(pulled, (*x, *given), (*d_x, *d_given))
        return gradients, {name: cast(d_gradients[name], g.dtype) for name, g in gradients.items()}

    backward.defjvp(derivative)
    return backward


def _wide(arrays: Mapping[str, Array], tangents: Mapping[str, Array]) -> tuple[Any, Any]:
    """The arguments of `jax.jvp`: both in float32, where they are in half precision."""
    return (upcast_all(arrays),), (upcast_all(tangents),)


def _no_tangent(array: Array) -> Any:
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    return jnp.zeros_like(array) if is_float else np.zeros(array.shape, dtype=jax.dtypes.float0)
