"""Gradients of a runner by the framework's autograd, for the explicit `vjp` and `extend_vjp`.

No graph of the call was recorded there, so `forward` or `step` is computed again.
"""

from __future__ import annotations

from precondattn.arrays import DIFFERENTIATING, Array, Arrays, ByName, Residuals, library_of, vjp
from precondattn.backend import Runner, missing_method
from precondattn.frame import Frame


class DifferentiableRunner(Runner):
    """The base class of runners that consist of differentiable calls of PyTorch or JAX.

    A subclass defines `forward` and `step`, and no gradient.
    """

    differentiable = True
    by_autograd = frozenset({"backward", "step_backward"})

    def backward(
        self, inputs: ByName, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        if library_of(cotangent) not in DIFFERENTIATING:
            raise missing_method(self, "backward")

        def output(*arrays: Array) -> tuple[Array, ...]:
            return (self.forward(dict(zip(inputs, arrays, strict=True)), frame)[0],)

        gradients = vjp(output, list(inputs.values()), [cotangent])
        return dict(zip(inputs, gradients, strict=True))

    def step_backward(
        self, past: ByName, inputs: ByName, frame: Frame, cotangent: Array, d_buffers: ByName
    ) -> tuple[Arrays, Arrays]:
        if library_of(cotangent) not in DIFFERENTIATING:
            raise missing_method(self, "step_backward")
        count = len(past)

        def output_and_states(*arrays: Array) -> tuple[Array, ...]:
            states = dict(zip(past, arrays[:count], strict=True))
            tokens = dict(zip(inputs, arrays[count:], strict=True))
            out, updates = self.step(states, tokens, frame)
            replaced: Arrays = dict(updates)
            return out, *(replaced[name].value for name in past)

        cotangents = [cotangent, *(d_buffers[name] for name in past)]
        gradients = vjp(output_and_states, [*past.values(), *inputs.values()], cotangents)
        d_past, d_inputs = gradients[:count], gradients[count:]
        return dict(zip(inputs, d_inputs, strict=True)), dict(zip(past, d_past, strict=True))
