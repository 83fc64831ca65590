"""PyTorch: the gradients of the operators `forward` and `step`, and the second derivatives.

The operators `backward` and `step_backward` are differentiated as the vjp of the reference, any
number of times. Its memory is quadratic in the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, islice

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from precondattn.arrays import Arrays, Tree, cast
from precondattn.execution import definition
from precondattn.frameworks.torch.modes import check_cotangents, counts_flops
from precondattn.frameworks.torch.operators import (
    backward,
    forward,
    frame_of,
    named,
    step,
    step_backward,
)

Tensors = Sequence[Tensor]


def register_flops() -> None:
    """Make active FlopCounterModes count the operators; the module is slow to import."""
    if counts_flops():
        from precondattn.frameworks.torch import flops

        flops.register()


def _save(ctx: FunctionCtx, inputs: Tree, *lists: Sequence[Tensor | None]) -> None:
    """Save the texts among an operator's arguments, and lists of tensors, for the gradient."""
    ctx.named, ctx.layout = inputs[:2], inputs[-1]
    ctx.counts = tuple(map(len, lists))
    ctx.save_for_backward(*chain.from_iterable(lists))


def _save_arguments(ctx: FunctionCtx, inputs: Tree, output: Tree) -> None:
    _save(ctx, inputs, *inputs[2:-1])


def _saved(ctx: FunctionCtx) -> list[list[Tensor]]:
    tensors = iter(ctx.saved_tensors)
    return [list(islice(tensors, count)) for count in ctx.counts]


def _results(ctx: FunctionCtx, lists: Sequence[Tensors], frame: Tree, *others: Tree) -> Tree:
    """The gradients of all arguments; None for texts and for the arrays of a frame.

    Autograd treats a list that contains None as one argument, and a list of tensors as many. An
    argument that equals its default, such as an empty text, is not passed to autograd.
    """
    of_frame = None if any(each is None for each in frame) else [None] * len(frame)
    of_layout = (None,) if ctx.layout else ()
    return None, None, *lists, of_frame, *others, *of_layout


def _remember(ctx: FunctionCtx, inputs: Tree, output: Tree) -> None:
    _save(ctx, inputs, *inputs[2:-1], output)


def _differentiate(ctx: FunctionCtx, cotangents: Tree) -> Tree:
    check_cotangents(cotangents)
    register_flops()
    tensors, frame, outputs = _saved(ctx)
    gradients = backward(*ctx.named, tensors, frame, outputs, cotangents[0], ctx.layout)
    return _results(ctx, [gradients], frame)


def _differentiate_step(ctx: FunctionCtx, cotangents: Tree) -> Tree:
    check_cotangents(cotangents)
    register_flops()
    past, tensors, frame = _saved(ctx)
    gradients = step_backward(*ctx.named, past, tensors, frame, list(cotangents), ctx.layout)
    return _results(ctx, [gradients[: len(past)], gradients[len(past) :]], frame)


forward.register_autograd(_differentiate, setup_context=_remember)
step.register_autograd(_differentiate_step, setup_context=_save_arguments)


# ----------------------------------------------------------------------- second derivatives


def _pulled(
    function: Callable[..., Tensors], tensors: Tensors, cotangents: Tensors, d_gradients: Tree
) -> Tree:
    """The cotangents of the arguments of `function`'s vjp, from the cotangents of its results."""
    count = len(tensors)

    def gradient(*arguments: Tensor) -> Tensors:
        out, pull = torch.func.vjp(function, *arguments[:count])
        given = zip(arguments[count:], out, strict=True)
        return tuple(pull(tuple(cast(cotangent, result.dtype) for cotangent, result in given)))

    return torch.func.vjp(gradient, *tensors, *cotangents)[1](tuple(d_gradients))


def _remember_backward(ctx: FunctionCtx, inputs: Tree, output: Tree) -> None:
    _, _, tensors, frame, outputs, cotangent, _ = inputs
    _save(ctx, inputs, tensors, frame, [cotangent])
    ctx.outputs = len(outputs)


def _differentiate_backward(ctx: FunctionCtx, d_gradients: Tree) -> Tree:
    tensors, masks, cotangents = _saved(ctx)
    frame, of = frame_of(ctx.layout, masks, tensors[0]), named(*ctx.named)

    def output(*tensors: Tensor) -> Tensors:
        return (definition.output(of.piece, of.inputs(tensors), frame),)

    *d_tensors, d_cotangent = _pulled(output, tensors, cotangents, d_gradients)
    # The outputs are functions of the tensors; the derivatives include this dependence.
    return _results(ctx, [d_tensors], masks, [None] * ctx.outputs, d_cotangent)


def _differentiate_step_backward(ctx: FunctionCtx, d_gradients: Tree) -> Tree:
    past, tensors, masks, cotangents = _saved(ctx)
    states, end = len(past), len(past) + len(tensors)
    frame, of = frame_of(ctx.layout, masks, tensors[0]), named(*ctx.named)

    def output_and_states(*tensors: Tensor) -> Tensors:
        past = of.buffers(tensors[:states])
        out, updates = definition.step(of.piece, past, of.inputs(tensors[states:]), frame)
        replaced: Arrays = dict(updates)
        return (out, *(cast(replaced[key].value, old.dtype) for key, old in past.items()))

    result = _pulled(output_and_states, [*past, *tensors], cotangents, d_gradients)
    gradients = [list(result[:states]), list(result[states:end])]
    return _results(ctx, gradients, masks, list(result[end:]))


backward.register_autograd(_differentiate_backward, setup_context=_remember_backward)
step_backward.register_autograd(_differentiate_step_backward, setup_context=_save_arguments)
