"""PyTorch's autograd: a planned call as custom operators with a gradient, or without operators.

`operators.py` has the operators, `derivatives.py` their gradients, and `vmap.py` their rule for
vmap. Calls under transforms for which operators have no rule (torch.func.grad, forward-mode
differentiation) run on the reference.

An operator takes as much time as a short call itself. A call that nothing else observes is recorded
without. If something observes or differentiates its gradient, the gradient is the operator's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from precondattn.arrays import Array, Arrays, Residuals, Tree, cast, wants_gradient
from precondattn.cache import Replace, Updates
from precondattn.dispatch.plan import PlannedCall
from precondattn.execution.array_checks import values_of
from precondattn.execution.cotangents import gradients_at
from precondattn.execution.packed import MovedRows, taken
from precondattn.frame import Frame
from precondattn.frameworks.torch import operators, vmap  # noqa: F401
from precondattn.frameworks.torch.autocast import off
from precondattn.frameworks.torch.derivatives import register_flops
from precondattn.frameworks.torch.modes import check_cotangents, only_computes
from precondattn.frameworks.torch.operators import output_dtype, text_of, unaliased


def apply(planned: PlannedCall, inputs: Arrays, frame: Frame) -> Tensor:
    """The output of a planned call, differentiable with respect to its inputs."""
    if wants_gradient(*inputs.values()):
        return _called(operators.forward, planned, frame, [inputs])[0]
    return _called(operators.inference, planned, frame, [inputs])


def apply_step(
    planned: PlannedCall, past: Arrays, inputs: Arrays, frame: Frame
) -> tuple[Tensor, Updates]:
    """A step that replaces states, differentiable with respect to the states and the inputs."""
    out, *new = _called(operators.step, planned, frame, [past, inputs])
    return out, {name: Replace(state) for name, state in zip(past, new, strict=True)}


def apply_extension(
    planned: PlannedCall, past: Arrays, inputs: Arrays, frame: Frame, length: Tensor, count: Array
) -> tuple[Tensor, Updates]:
    """A step as one operator without gradient, which returns the whole updated buffers."""
    counts = count if isinstance(count, Tensor) else length.new_full(length.shape, count)
    out, *new = _called(operators.extension, planned, frame, [past, inputs], length, counts)
    return out, {name: Replace(buffer) for name, buffer in zip(past, new, strict=True)}


def with_residuals(planned: PlannedCall, inputs: Arrays, frame: Frame) -> tuple[Tensor, Residuals]:
    """The output of a planned call, and the residuals, under vmap."""
    out, *residuals = _called(operators.forward, planned, frame, [inputs])
    return out, tuple(residuals)


def gradients(
    planned: PlannedCall, inputs: Arrays, frame: Frame, out: Tensor, residuals: Tree, d_out: Tensor
) -> Arrays:
    """The gradients of a planned call, under vmap, or of a call without operators."""
    if planned.runner.differentiable:  # PyTorch's functions save their own residuals.
        out, residuals = with_residuals(planned, inputs, frame)
    found = _called(operators.backward, planned, frame, [inputs], [out, *residuals], d_out)
    return dict(zip(inputs, found, strict=True))


def step_gradients(
    planned: PlannedCall, past: Arrays, inputs: Arrays, frame: Frame, d_out: Tensor, d_new: Arrays
) -> tuple[Arrays, Arrays]:
    """The gradients of a step with respect to its inputs and the old states, under vmap."""
    cotangents = [d_out, *(d_new[name] for name in past)]
    found = _called(operators.step_backward, planned, frame, [past, inputs], cotangents)
    d_past, d_inputs = found[: len(past)], found[len(past) :]
    return dict(zip(inputs, d_inputs, strict=True)), dict(zip(past, d_past, strict=True))


def _called(
    operator: Tree, planned: PlannedCall, frame: Frame, arrays: list[Arrays], *others: Tree
) -> Tree:
    """The results of an operator on lists of arrays, a frame, and other arguments."""
    register_flops()
    lists = [list(each.values()) for each in arrays]
    masks, layout = list(frame.sources), text_of(frame.layout)
    return operator(planned.piece._name, planned.backend.name, *lists, masks, *others, layout)


def apply_recorded(planned: PlannedCall, inputs: dict[str, Tensor], frame: Frame) -> Tensor:
    """As `apply`, without operators."""
    for tensor in inputs.values():
        if tensor.requires_grad:
            return _Recorded.apply(planned, (*inputs,), frame, *inputs.values())
    return planned.runner.forward(inputs, frame)[0]


class _Recorded(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        planned: PlannedCall,
        names: tuple[str, ...],
        frame: Frame,
        *tensors: Tensor,
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
        check_cotangents([cotangent])
        if torch.is_grad_enabled() or not only_computes():
            found = gradients(planned, inputs, ctx.frame, out, residuals, cotangent)
            return None, None, None, *found.values()
        if not planned.backend.wide_values:
            out = cast(out, values_of(inputs).dtype)
        arguments = inputs, ctx.frame, out, tuple(residuals)
        with off(cotangent):
            found = gradients_at(cotangent, planned.runner, *arguments)
        narrow = [found[name].to(tensor.dtype) for name, tensor in inputs.items()]
        return None, None, None, *unaliased(narrow, [*tensors, *outputs, cotangent])


class Moved(torch.autograd.Function):  # type: ignore[misc]
    """Moved rows, whose gradient is moved back; that of `index_select` adds rows one by one."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, *rows: Tensor | None) -> Tensor:
        return taken(tensor, MovedRows(*rows))

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: Tree, output: Tree) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: FunctionCtx, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        back = MovedRows(*ctx.saved_tensors).back
        return Moved.apply(cotangent, *back), None, None, None, None
