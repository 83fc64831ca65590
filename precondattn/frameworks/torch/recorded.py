"""PyTorch's autograd without operators, for calls that nothing else observes.

An operator takes as much time as a short call itself. If one of these observes the gradient, or
differentiates it, the gradient uses the operator.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from precondattn.arrays import Tree, cast
from precondattn.dispatch.plan import PlannedCall
from precondattn.execution.array_checks import values_of
from precondattn.execution.cotangents import gradients_at
from precondattn.frame import Frame
from precondattn.frameworks.torch import autograd, derivatives
from precondattn.frameworks.torch.autocast import off
from precondattn.frameworks.torch.legacy_vmap import is_mapped
from precondattn.frameworks.torch.modes import only_computes
from precondattn.frameworks.torch.operators import output_dtype, unaliased

Names = tuple[str, ...]


def apply(planned: PlannedCall, inputs: dict[str, Tensor], frame: Frame) -> Tensor:
    """The output of a planned call, differentiable with respect to its inputs."""
    for tensor in inputs.values():
        if tensor.requires_grad:
            return _Recorded.apply(planned, (*inputs,), frame, *inputs.values())
    return planned.runner.forward(inputs, frame)[0]


class _Recorded(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: FunctionCtx, planned: PlannedCall, names: Names, frame: Frame, *tensors: Tensor
    ) -> Tensor:
        inputs = dict(zip(names, tensors, strict=True))
        out, residuals = planned.runner.forward_with_residuals(inputs, frame)
        dtype = output_dtype(inputs, is_wide=planned.backend.wide_values, has_gradient=True)
        outputs = unaliased([cast(out, dtype), *residuals], tensors)
        ctx.planned, ctx.names, ctx.frame = planned, names, frame
        ctx.save_for_backward(*tensors, *outputs)
        return outputs[0]

    @staticmethod
    def backward(ctx: FunctionCtx, cotangent: Tensor) -> Tree:
        planned, saved, count = ctx.planned, ctx.saved_tensors, len(ctx.names)
        tensors, outputs = saved[:count], saved[count:]
        out, *residuals = outputs
        inputs = dict(zip(ctx.names, tensors, strict=True))
        if torch.is_grad_enabled() or not only_computes() or is_mapped(cotangent):
            derivatives.check_tangents([cotangent])
            found = autograd.gradients(planned, inputs, ctx.frame, out, residuals, cotangent)
            return None, None, None, *found.values()
        if not planned.backend.wide_values:
            out = cast(out, values_of(inputs).dtype)
        arguments = inputs, ctx.frame, out, tuple(residuals)
        with off(cotangent):
            found = gradients_at(cotangent, planned.runner, *arguments)
        gradients = [found[name].to(tensor.dtype) for name, tensor in inputs.items()]
        return None, None, None, *unaliased(gradients, [*tensors, *outputs, cotangent])
