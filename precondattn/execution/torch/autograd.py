"""PyTorch's autograd: a planned call as operators that have a gradient.

`operators.py` has the operators, `second_derivative.py` the derivatives of their gradients, and
`vmap.py` their rule for vmap. Transforms for which operators have no rule (torch.func.grad,
forward-mode differentiation) are planned on the reference.
"""

from __future__ import annotations

from torch import Tensor
from torch.autograd.function import FunctionCtx

from precondattn.arrays import Arrays, Tree, counts_flops, has_tangent, wants_gradient
from precondattn.cache import Replace, Updates
from precondattn.dispatch.plan import PlannedCall
from precondattn.execution.torch import second_derivative, vmap  # noqa: F401
from precondattn.execution.torch.frames import text_of
from precondattn.execution.torch.operators import (
    backward,
    extension,
    forward,
    inference,
    step,
    step_backward,
)
from precondattn.execution.torch.saved import no_gradient, save, save_arguments, saved
from precondattn.frame import Frame


def apply(planned: PlannedCall, inputs: Arrays, frame: Frame) -> Tensor:
    """The output of a planned call, differentiable in its inputs."""
    if wants_gradient(*inputs.values()):
        return _called(forward, planned, frame, [inputs])[0]
    return _called(inference, planned, frame, [inputs])


def apply_step(
    planned: PlannedCall, past: Arrays, inputs: Arrays, frame: Frame
) -> tuple[Tensor, Updates]:
    """A step that replaces the states of a cache, differentiable in them and in the inputs."""
    out, *new = _called(step, planned, frame, [past, inputs])
    return out, {name: Replace(state) for name, state in zip(past, new, strict=True)}


def apply_extension(
    planned: PlannedCall,
    past: Arrays,
    inputs: Arrays,
    frame: Frame,
    length: Tensor,
    count: Tensor | int,
) -> tuple[Tensor, Updates]:
    """A step as one operator without gradient, which returns the whole updated buffers."""
    counts = count if isinstance(count, Tensor) else length.new_full(length.shape, count)
    out, *new = _called(extension, planned, frame, [past, inputs], length, counts)
    return out, {name: Replace(buffer) for name, buffer in zip(past, new, strict=True)}


def with_residuals(
    planned: PlannedCall, inputs: Arrays, frame: Frame
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output of a planned call and the residuals, under vmap."""
    out, *residuals = _called(forward, planned, frame, [inputs])
    return out, tuple(residuals)


def gradients(
    planned: PlannedCall,
    inputs: Arrays,
    frame: Frame,
    out: Tensor,
    residuals: tuple[Tensor, ...],
    cotangent: Tensor,
) -> Arrays:
    """The gradients of a planned call, under vmap."""
    if planned.runner.differentiable:  # PyTorch's own functions keep their residuals themselves.
        out, residuals = with_residuals(planned, inputs, frame)
    found = _called(backward, planned, frame, [inputs], [out, *residuals], cotangent)
    return dict(zip(inputs, found, strict=True))


def recorded_gradients(
    planned: PlannedCall, inputs: Arrays, frame: Frame, outputs: list[Tensor], cotangent: Tensor
) -> list[Tensor]:
    """The gradients of a planned call that was called without operators (`recorded.py`)."""
    _check_tangents([cotangent])
    found: list[Tensor] = _called(backward, planned, frame, [inputs], outputs, cotangent)
    return found


def step_gradients(
    planned: PlannedCall,
    past: Arrays,
    inputs: Arrays,
    frame: Frame,
    cotangent: Tensor,
    d_buffers: Arrays,
) -> tuple[Arrays, Arrays]:
    """The gradients of a step, of its inputs and of the old states, under vmap."""
    cotangents = [cotangent, *(d_buffers[name] for name in past)]
    found = _called(step_backward, planned, frame, [past, inputs], cotangents)
    d_past, d_inputs = found[: len(past)], found[len(past) :]
    return dict(zip(inputs, d_inputs, strict=True)), dict(zip(past, d_past, strict=True))


def _called(
    operator: Tree, planned: PlannedCall, frame: Frame, arrays: list[Arrays], *others: Tree
) -> Tree:
    """The results of an operator, whose arguments are texts, arrays, the frame, and others."""
    _register_flops()
    lists = [list(each.values()) for each in arrays]
    masks, layout = list(frame.sources), text_of(frame.layout)
    return operator(planned.piece._name, planned.backend.name, *lists, masks, *others, layout)


def _register_flops() -> None:
    """Let a FlopCounterMode that is active count the operators. Its module is slow to import."""
    if counts_flops():
        from precondattn.execution.torch import flops

        flops.register()


def _check_tangents(cotangents: Tree) -> None:
    if has_tangent(*cotangents):
        raise NotImplementedError(
            "forward-mode differentiation of a gradient needs tangents of the call's inputs too, "
            'or a call with backend="reference"'
        )


def _remember(ctx: FunctionCtx, inputs: Tree, output: Tree) -> None:
    save(ctx, inputs, *inputs[2:-1], output)


def _differentiate(ctx: FunctionCtx, cotangents: Tree) -> Tree:
    _check_tangents(cotangents)
    _register_flops()
    tensors, frame, outputs = saved(ctx)
    arguments = tensors, frame, outputs, cotangents[0], ctx.layout
    gradients = backward(ctx.piece, ctx.backend, *arguments)
    of_frame, of_layout = no_gradient(ctx, frame)
    return None, None, gradients, of_frame, *of_layout


def _differentiate_step(ctx: FunctionCtx, cotangents: Tree) -> Tree:
    _check_tangents(cotangents)
    _register_flops()
    past, tensors, frame = saved(ctx)
    arguments = past, tensors, frame, list(cotangents), ctx.layout
    gradients = step_backward(ctx.piece, ctx.backend, *arguments)
    of_frame, of_layout = no_gradient(ctx, frame)
    return None, None, gradients[: len(past)], gradients[len(past) :], of_frame, *of_layout


forward.register_autograd(_differentiate, setup_context=_remember)
step.register_autograd(_differentiate_step, setup_context=save_arguments)
