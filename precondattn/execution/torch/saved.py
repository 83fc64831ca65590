"""PyTorch: the arguments of an operator, saved for its gradient, and those that have none."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

from torch import Tensor
from torch.autograd.function import FunctionCtx

from precondattn.arrays import Tree


def save(ctx: FunctionCtx, inputs: Tree, *lists: Sequence[Tensor | None]) -> None:
    """Keep the texts among the arguments of an operator, and lists of tensors."""
    ctx.piece, ctx.backend, *_, ctx.layout = inputs
    ctx.counts = tuple(map(len, lists))
    ctx.save_for_backward(*chain.from_iterable(lists))


def save_arguments(ctx: FunctionCtx, inputs: Tree, output: Tree) -> None:
    """Keep all arguments of an operator of lists."""
    save(ctx, inputs, *inputs[2:-1])


def saved(ctx: FunctionCtx) -> list[list[Tensor]]:
    """The lists of tensors."""
    tensors = iter(ctx.saved_tensors)
    return [list(islice(tensors, count)) for count in ctx.counts]


def no_gradient(ctx: FunctionCtx, frame: Sequence[Tensor | None]) -> tuple[Tree, tuple[None, ...]]:
    """The gradients of a frame's arrays and of the text of its layout.

    Autograd treats a list that contains None as one argument, and a list of tensors as many. It is
    not given an argument that equals its default, as an empty text does.
    """
    of_frame = None if any(each is None for each in frame) else [None] * len(frame)
    return of_frame, (None,) if ctx.layout else ()
