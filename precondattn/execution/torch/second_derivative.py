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

from precondattn.arrays import Arrays, Tree, cast
from precondattn.execution import definition
from precondattn.execution.torch.frames import frame_of
from precondattn.execution.torch.operators import backward, named, step_backward
from precondattn.execution.torch.saved import no_gradient, save, save_arguments, saved

Tensors = tuple[Tensor, ...]


def _pulled(
    function: Callable[..., Tensors],
    tensors: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    d_gradients: Tree,
) -> Tensors:
    """The cotangents of the arguments of the vjp of `function`, from those of its results."""
    count = len(tensors)

    def gradient(*arguments: Tensor) -> Tensors:
        out, pull = torch.func.vjp(function, *arguments[:count])
        given = zip(arguments[count:], out, strict=True)
        return tuple(pull(tuple(cast(cotangent, result.dtype) for cotangent, result in given)))

    pulled: Tensors = torch.func.vjp(gradient, *tensors, *cotangents)[1](tuple(d_gradients))
    return pulled


def _remember(ctx: FunctionCtx, inputs: Tree, output: Tree) -> None:
    _, _, tensors, frame, outputs, cotangent, _ = inputs
    save(ctx, inputs, tensors, frame, [cotangent])
    ctx.outputs = len(outputs)


def _differentiate(ctx: FunctionCtx, d_gradients: Tree) -> Tree:
    tensors, masks, cotangents = saved(ctx)
    frame, of = frame_of(ctx.layout, masks, tensors[0]), named(ctx.piece, ctx.backend)

    def output(*tensors: Tensor) -> Tensors:
        return (definition.output(of.piece, of.inputs(tensors), frame),)

    *d_tensors, d_cotangent = _pulled(output, tensors, cotangents, d_gradients)
    # The outputs are functions of the tensors, whose derivatives include this dependence.
    of_frame, of_layout = no_gradient(ctx, masks)
    return None, None, d_tensors, of_frame, [None] * ctx.outputs, d_cotangent, *of_layout


def _differentiate_step(ctx: FunctionCtx, d_gradients: Tree) -> Tree:
    past, tensors, masks, cotangents = saved(ctx)
    states, end = len(past), len(past) + len(tensors)
    frame, of = frame_of(ctx.layout, masks, tensors[0]), named(ctx.piece, ctx.backend)

    def output_and_states(*tensors: Tensor) -> Tensors:
        past = of.buffers(tensors[:states])
        out, updates = definition.step(of.piece, past, of.inputs(tensors[states:]), frame)
        replaced: Arrays = dict(updates)
        return (out, *(cast(replaced[key].value, old.dtype) for key, old in past.items()))

    result = _pulled(output_and_states, [*past, *tensors], cotangents, d_gradients)
    of_frame, of_layout = no_gradient(ctx, masks)
    gradients = list(result[:states]), list(result[states:end]), of_frame, list(result[end:])
    return None, None, *gradients, *of_layout


backward.register_autograd(_differentiate, setup_context=_remember)
step_backward.register_autograd(_differentiate_step, setup_context=save_arguments)
