"""PyTorch: second derivatives, those of the operators `backward` and `step_backward`.

No backend has second derivatives. The gradient operators are differentiated as what they compute,
the vjp of the reference, which is computed again by PyTorch's own calls. Its memory is quadratic in
the number of tokens. The result can be differentiated further.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from precondattn.algebra.names import piece_named
from precondattn.algebra.piece import Piece
from precondattn.arrays import Tree, cast, upcast_all
from precondattn.execution.torch.frames import frame_of, no_gradient_of
from precondattn.execution.torch.operators import backward, named_inputs
from precondattn.execution.torch.steps import named_buffers, step_backward
from precondattn.frame import Frame

Tensors = tuple[Tensor, ...]
Function = Callable[..., Tensors]


def _forward_of(piece: Piece, frame: Frame) -> Function:
    """The reference's output, as a function of the piece's inputs in order."""

    def function(*tensors: Tensor) -> Tensors:
        values = named_inputs(piece, tensors)
        for call in piece.program.calls:
            x = upcast_all({formal: values[value] for formal, value in call.arguments})
            values[call.out] = call.leaf.forward(x, frame)[0]
        return (values[piece.program.out],)

    return function


def _step_of(piece: Piece, frame: Frame, count: int) -> Function:
    """The reference's output and new states, of `count` states and then the inputs."""

    def function(*tensors: Tensor) -> Tensors:
        past = named_buffers(piece, tensors[:count])
        values, new = named_inputs(piece, tensors[count:]), dict[str, Tensor]()
        for call in piece.program.calls:
            keys = call.slot_keys()
            x = upcast_all({formal: values[value] for formal, value in call.arguments})
            states = upcast_all({slot: past[key] for slot, key in keys.items()})
            step: Tree = call.leaf.step(states, x, frame)
            values[call.out], updates = step
            for slot, key in keys.items():
                new.setdefault(key, cast(updates[slot].value, past[key].dtype))
        return (values[piece.program.out], *(new[key] for key in past))

    return function


def _gradient_of(
    function: Function, tensors: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> Tree:
    """The vjp of `function`, and the function that pulls cotangents of its results back."""
    count = len(tensors)

    def gradient(*arguments: Tensor) -> Tensors:
        out, pull = torch.func.vjp(function, *arguments[:count])
        given = zip(arguments[count:], out, strict=True)
        return tuple(pull(tuple(cast(cotangent, result.dtype) for cotangent, result in given)))

    return torch.func.vjp(gradient, *tensors, *cotangents)


def _remember(ctx: FunctionCtx, inputs: Tree, output: Tree) -> None:
    ctx.piece, _, tensors, frame, outputs, cotangent, ctx.layout = inputs
    ctx.split, ctx.outputs = (len(tensors), len(tensors) + len(frame)), len(outputs)
    ctx.save_for_backward(*tensors, *frame, cotangent)


def _differentiate(ctx: FunctionCtx, d_gradients: Tree) -> Tree:
    *saved, cotangent = ctx.saved_tensors
    (end, split), piece = ctx.split, piece_named(ctx.piece)
    function = _forward_of(piece, frame_of(ctx.layout, saved[end:split], saved[0]))
    _, pull = _gradient_of(function, saved[:end], [cotangent])
    *d_tensors, d_cotangent = pull(tuple(d_gradients))
    # The outputs are functions of the tensors, whose derivatives include this dependence.
    frame, outputs = _none(saved[end:split]), [None] * ctx.outputs
    of_layout = no_gradient_of(ctx.layout)
    return None, None, list(d_tensors), frame, outputs, d_cotangent, *of_layout


def _remember_step(ctx: FunctionCtx, inputs: Tree, output: Tree) -> None:
    ctx.piece, _, past, tensors, frame, cotangents, ctx.layout = inputs
    ctx.counts = len(past), len(tensors), len(frame)
    ctx.save_for_backward(*past, *tensors, *frame, *cotangents)


def _differentiate_step(ctx: FunctionCtx, d_gradients: Tree) -> Tree:
    saved, (states, inputs, masks) = list(ctx.saved_tensors), ctx.counts
    end, split = states + inputs, states + inputs + masks
    frame = frame_of(ctx.layout, saved[end:split], saved[0])
    function = _step_of(piece_named(ctx.piece), frame, states)
    _, pull = _gradient_of(function, saved[:end], saved[split:])
    result = list(pull(tuple(d_gradients)))
    gradients = result[:states], result[states:end], _none(saved[end:split]), result[end:]
    return None, None, *gradients, *no_gradient_of(ctx.layout)


def _none(masks: Sequence[Tensor | None]) -> Tree:
    """The gradients of masks: autograd takes a list that contains None for one argument."""
    return None if any(mask is None for mask in masks) else [None] * len(masks)


backward.register_autograd(_differentiate, setup_context=_remember)
step_backward.register_autograd(_differentiate_step, setup_context=_remember_step)
