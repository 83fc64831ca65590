"""The gradients of a backend that does not define them, by the framework's autograd.

They serve the explicit `vjp` and `extend_vjp`. No graph of the call was recorded there, so
`forward` or `step` is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from precondattn.arrays import DIFFERENTIATING, Array, Arrays, Residuals, Tree, library_of, vjp

if TYPE_CHECKING:
    from precondattn.backend import MethodsOf
    from precondattn.frame import Frame

GRADIENTS = ("backward", "step_backward")
"""The names of the backend methods that compute gradients."""


def gradient_of(methods: MethodsOf, name: str) -> Callable[..., Tree]:
    """The method `name`, computed by the automatic differentiation of the arrays' library."""
    own = getattr(methods, name)
    by_autograd = partial(_backward if name == "backward" else _step_backward, methods)

    def gradient(first: Mapping[str, Array], *others: Tree) -> Tree:
        is_possible = library_of(next(iter(first.values()))) in DIFFERENTIATING
        return by_autograd(first, *others) if is_possible else own(first, *others)

    return gradient


def _backward(
    methods: MethodsOf,
    inputs: Mapping[str, Array],
    frame: Frame,
    out: Array,
    residuals: Residuals,
    cotangent: Array,
) -> Arrays:
    def output(*arrays: Array) -> tuple[Array, ...]:
        return (methods.forward(dict(zip(inputs, arrays, strict=True)), frame)[0],)

    gradients = vjp(output, list(inputs.values()), [cotangent])
    return dict(zip(inputs, gradients, strict=True))


def _step_backward(
    methods: MethodsOf,
    past: Mapping[str, Array],
    inputs: Mapping[str, Array],
    frame: Frame,
    cotangent: Array,
    d_buffers: Mapping[str, Array],
) -> tuple[Arrays, Arrays]:
    count = len(past)

    def output_and_states(*arrays: Array) -> tuple[Array, ...]:
        states = dict(zip(past, arrays[:count], strict=True))
        tokens = dict(zip(inputs, arrays[count:], strict=True))
        out, updates = methods.step(states, tokens, frame)
        replaced: Arrays = dict(updates)
        return out, *(replaced[name].value for name in past)

    cotangents = [cotangent, *(d_buffers[name] for name in past)]
    gradients = vjp(output_and_states, [*past.values(), *inputs.values()], cotangents)
    d_past, d_inputs = gradients[:count], gradients[count:]
    return dict(zip(inputs, d_inputs, strict=True)), dict(zip(past, d_past, strict=True))
