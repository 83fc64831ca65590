"""PyTorch's autograd: a planned call as operators that have a gradient.

`operators.py` has the operators of full calls, `steps.py` those of extensions,
`second_derivative.py` the derivatives of their gradients, and `vmap.py` their rule for vmap.
Transforms for which operators have no rule (torch.func.grad, forward-mode differentiation)
are planned on the reference.
"""

from __future__ import annotations

from torch import Tensor
from torch.autograd.function import FunctionCtx

from precondattn.arrays import Tree, counts_flops, has_tangent, wants_gradient
from precondattn.cache import Replace, Updates
from precondattn.dispatch.plan import PlannedCall
from precondattn.execution.torch import second_derivative, vmap  # noqa: F401
from precondattn.execution.torch.frames import no_gradient_of, text_of
from precondattn.execution.torch.operators import backward, forward, inference
from precondattn.execution.torch.steps import extension, step, step_backward
from precondattn.frame import Frame


def apply(planned: PlannedCall, inputs: dict[str, Tensor], frame: Frame) -> Tensor:
    """The output of a planned call, differentiable in its inputs."""
    piece, backend = planned.piece._name, planned.backend.name
    tensors = list(inputs.values())
    _register_flops()
    if wants_gradient(*tensors):
        return forward(piece, backend, tensors, *_parts(frame))[0]
    return inference(piece, backend, tensors, *_parts(frame))


def apply_step(
    planned: PlannedCall, past: dict[str, Tensor], inputs: dict[str, Tensor], frame: Frame
) -> tuple[Tensor, Updates]:
    """A step that replaces the states of a cache, differentiable in them and in the inputs."""
    piece, backend = planned.piece._name, planned.backend.name
    states, tensors = list(past.values()), list(inputs.values())
    _register_flops()
    out, *new = step(piece, backend, states, tensors, *_parts(frame))
    return out, {name: Replace(state) for name, state in zip(past, new, strict=True)}


def apply_extension(
    planned: PlannedCall,
    past: dict[str, Tensor],
    inputs: dict[str, Tensor],
    frame: Frame,
    length: Tensor,
    count: Tensor | int,
) -> tuple[Tensor, Updates]:
    """A step as one operator without gradient, which returns the whole updated buffers."""
    piece, backend = planned.piece._name, planned.backend.name
    buffers, tensors = list(past.values()), list(inputs.values())
    counts = count if isinstance(count, Tensor) else length.new_full(length.shape, count)
    _register_flops()
    masks, layout = _parts(frame)
    out, *new = extension(piece, backend, buffers, tensors, masks, length, counts, layout)
    return out, {name: Replace(buffer) for name, buffer in zip(past, new, strict=True)}


def with_residuals(
    planned: PlannedCall, inputs: dict[str, Tensor], frame: Frame
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output of a planned call and the residuals, under vmap."""
    tensors = list(inputs.values())
    out, *residuals = forward(planned.piece._name, planned.backend.name, tensors, *_parts(frame))
    return out, tuple(residuals)


def gradients(
    planned: PlannedCall,
    inputs: dict[str, Tensor],
    frame: Frame,
    out: Tensor,
    residuals: tuple[Tensor, ...],
    cotangent: Tensor,
) -> dict[str, Tensor]:
    """The gradients of a planned call, under vmap."""
    if planned.runner.differentiable:  # PyTorch's own functions keep their residuals themselves.
        out, residuals = with_residuals(planned, inputs, frame)
    piece, backend = planned.piece._name, planned.backend.name
    tensors, (masks, layout) = list(inputs.values()), _parts(frame)
    found = backward(piece, backend, tensors, masks, [out, *residuals], cotangent, layout)
    return dict(zip(inputs, found, strict=True))


def recorded_gradients(
    planned: PlannedCall,
    tensors: list[Tensor],
    frame: Frame,
    outputs: list[Tensor],
    cotangent: Tensor,
) -> list[Tensor]:
    """The gradients of a planned call that was called without operators (`recorded.py`)."""
    _check_tangents([cotangent])
    _register_flops()
    piece, backend, (masks, layout) = planned.piece._name, planned.backend.name, _parts(frame)
    found: list[Tensor] = backward(piece, backend, tensors, masks, outputs, cotangent, layout)
    return found


def step_gradients(
    planned: PlannedCall,
    past: dict[str, Tensor],
    inputs: dict[str, Tensor],
    frame: Frame,
    cotangent: Tensor,
    d_buffers: dict[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients of a step, of its inputs and of the old states, under vmap."""
    piece, backend = planned.piece._name, planned.backend.name
    states, tensors, (masks, layout) = list(past.values()), list(inputs.values()), _parts(frame)
    cotangents = [cotangent, *(d_buffers[name] for name in past)]
    found = step_backward(piece, backend, states, tensors, masks, cotangents, layout)
    d_past, d_inputs = found[: len(states)], found[len(states) :]
    return dict(zip(inputs, d_inputs, strict=True)), dict(zip(past, d_past, strict=True))


def _parts(frame: Frame) -> tuple[list[Tensor | None], str]:
    """A frame as arguments of an operator."""
    return list(frame.sources), text_of(frame.layout)


def _register_flops() -> None:
    """Let a FlopCounterMode that is active count the operators. Its module is slow to import."""
    if counts_flops():
        from precondattn.execution.torch import flops

        flops.register()


def _no_gradient(tensors: Tree) -> Tree:
    """The gradients of a list of masks.

    Autograd treats a list that contains None as one argument, and a list of tensors as many.
    """
    return None if any(each is None for each in tensors) else [None] * len(tensors)


def _check_tangents(cotangents: Tree) -> None:
    if has_tangent(*cotangents):
        raise NotImplementedError(
            "forward-mode differentiation of a gradient needs tangents of the call's inputs too, "
            'or a call with backend="reference"'
        )


def _remember(ctx: FunctionCtx, inputs: Tree, output: Tree) -> None:
    ctx.piece, ctx.backend, tensors, frame, ctx.layout = inputs
    ctx.split = len(tensors), len(tensors) + len(frame)
    ctx.save_for_backward(*tensors, *frame, *output)


def _differentiate(ctx: FunctionCtx, cotangents: Tree) -> Tree:
    _check_tangents(cotangents)
    _register_flops()
    saved, (end, split) = list(ctx.saved_tensors), ctx.split
    tensors, frame, outputs = saved[:end], saved[end:split], saved[split:]
    arguments = tensors, frame, outputs, cotangents[0], ctx.layout
    gradients = backward(ctx.piece, ctx.backend, *arguments)
    return None, None, gradients, _no_gradient(frame), *no_gradient_of(ctx.layout)


def _remember_step(ctx: FunctionCtx, inputs: Tree, output: Tree) -> None:
    ctx.piece, ctx.backend, past, tensors, frame, ctx.layout = inputs
    ctx.split = len(past), len(past) + len(tensors)
    ctx.save_for_backward(*past, *tensors, *frame)


def _differentiate_step(ctx: FunctionCtx, cotangents: Tree) -> Tree:
    _check_tangents(cotangents)
    _register_flops()
    saved, (end, split) = list(ctx.saved_tensors), ctx.split
    past, tensors, frame = saved[:end], saved[end:split], saved[split:]
    arguments = past, tensors, frame, list(cotangents), ctx.layout
    gradients = step_backward(ctx.piece, ctx.backend, *arguments)
    of_frame = _no_gradient(frame), *no_gradient_of(ctx.layout)
    return None, None, gradients[:end], gradients[end:], *of_frame


forward.register_autograd(_differentiate, setup_context=_remember)
step.register_autograd(_differentiate_step, setup_context=_remember_step)
