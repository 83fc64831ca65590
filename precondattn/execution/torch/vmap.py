"""vmap of PyTorch's operators: mapped calls are one call of more sequences, or of more heads.

`folded_axes.py` has the axes into which the mapped one is folded. An array that is not
mapped, such as the keys where only a cotangent is, is repeated: each call has a gradient of it.
Calls are made one after another where no axes serve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from precondattn.algebra.declaration import Pattern, Sizes
from precondattn.algebra.names import piece_named
from precondattn.algebra.piece import Piece
from precondattn.arrays import Tree
from precondattn.execution.torch import older_vmap
from precondattn.execution.torch.folded_axes import (
    KINDS,
    AxesOf,
    MappedArrays,
    OneCall,
    SeparateCallsError,
)
from precondattn.execution.torch.older_vmap import Operator
from precondattn.execution.torch.operators import backward, forward, inference
from precondattn.execution.torch.steps import extension, step, step_backward

SEQUENCES = (Pattern.read("b"),)


class VmapAxes(NamedTuple):
    """The axes into which the mapped one is folded."""

    arguments: list[AxesOf]
    """A list of axes for every argument, which is a list of arrays."""
    results: AxesOf


# ------------------------------------------------------------------------- axes, by operator


def _inference(call: OneCall, backend: str, tensors: MappedArrays, frame: MappedArrays) -> VmapAxes:
    axes = [call.axes_of(_inputs(call), tensors), call.of_frame(frame)]
    return VmapAxes(axes, [call.of_result(call.piece.program.output)])


def _forward(call: OneCall, backend: str, tensors: MappedArrays, frame: MappedArrays) -> VmapAxes:
    arguments, out = _inference(call, backend, tensors, frame)
    return VmapAxes(arguments, out + call.of_residuals(backend, tensors, frame))


def _backward(
    call: OneCall,
    backend: str,
    tensors: MappedArrays,
    frame: MappedArrays,
    outputs: MappedArrays,
    cotangent: MappedArrays,
) -> VmapAxes:
    gradients = call.axes_of(_inputs(call), tensors, each=True)
    out: AxesOf = [call.of_result(call.piece.program.output)]
    residuals = call.of_saved(backend, tensors, frame, outputs.shapes[1:])
    return VmapAxes([gradients, call.of_frame(frame), out + residuals, out], gradients)


def _step(
    call: OneCall,
    backend: str,
    past: MappedArrays,
    tensors: MappedArrays,
    frame: MappedArrays,
    *counts: MappedArrays,
) -> VmapAxes:
    buffers = call.axes_of(_buffers(call), past, each=True)
    axes = [buffers, call.axes_of(_inputs(call), tensors), call.of_frame(frame)]
    axes += [call.axes_of(SEQUENCES, each) for each in counts]
    return VmapAxes(axes, [call.of_result(call.piece.program.output), *buffers])


def _step_backward(
    call: OneCall,
    backend: str,
    past: MappedArrays,
    tensors: MappedArrays,
    frame: MappedArrays,
    cotangents: MappedArrays,
) -> VmapAxes:
    states = call.axes_of(_buffers(call), past, each=True)
    gradients = call.axes_of(_inputs(call), tensors, each=True)
    out = call.of_result(call.piece.program.output)
    return VmapAxes([states, gradients, call.of_frame(frame), [out, *states]], states + gradients)


def _inputs(call: OneCall) -> list[Pattern]:
    return list(call.piece.inputs.values())


def _buffers(call: OneCall) -> list[Pattern]:
    return [pattern for _, pattern in call.piece.program.slots.values()]


def _sizes(piece: Piece, lists: Sequence[MappedArrays]) -> Sizes:
    """The sizes of a full call, whose inputs come first."""
    shapes = dict(zip(piece.inputs, lists[0].shapes, strict=True))
    sizes: Sizes = piece.inputs.sizes(str(piece), shapes)
    return sizes


def _sizes_of_step(piece: Piece, lists: Sequence[MappedArrays]) -> Sizes:
    """The sizes of a step, whose inputs come after its buffers."""
    shapes = dict(zip(piece.inputs, lists[1].shapes, strict=True))
    sizes: Sizes = piece.inputs.extending().sizes(str(piece), shapes)
    return sizes


# ------------------------------------------------------------------------------ the rule


def _register(
    operator: Operator, axes_of: Callable[..., VmapAxes], sizes_of: Tree = _sizes
) -> None:
    """Let both kinds of PyTorch's vmap map an operator."""

    def one_call(
        piece: str, backend: str, lists: list[MappedArrays], count: int, layout: str
    ) -> VmapAxes | None:
        mechanism = piece_named(piece)
        sizes = sizes_of(mechanism, lists)
        for kind in KINDS:
            try:
                call = OneCall(mechanism, sizes, kind, count, layout)
                return axes_of(call, backend, *lists)
            except SeparateCallsError:
                continue
        return None

    def rule(info: Tree, in_dims: Tree, piece: str, backend: str, *given: Tree) -> Tree:
        count = info.batch_size
        # PyTorch passes no argument that equals its default.
        *arguments, layout = given if isinstance(given[-1], str) else (*given, "")
        mapped = in_dims[2 : 2 + len(arguments)]
        lists = [MappedArrays.of_argument(*pair) for pair in zip(arguments, mapped, strict=True)]

        def results_of(arrays: Sequence[list[Tree]]) -> Tree:
            pairs = zip(arguments, arrays, strict=True)
            new = (each if isinstance(old, list) else each[0] for old, each in pairs)
            return operator(piece, backend, *new, layout)

        axes = one_call(piece, backend, lists, count, layout) if count > 1 else None
        if axes is not None:
            folds = zip(lists, axes.arguments, strict=True)
            results = results_of([each.folded(at, count) for each, at in folds])
            is_list, out_dims = isinstance(results, list), axes.results
            pairs = zip(results if is_list else [results], out_dims, strict=True)
            unfolded = [_unfolded(result, at, count) for result, at in pairs]
        else:  # The shapes of no calls are those of one call, of zeros.
            numbers = range(max(count, 1))
            calls = [results_of([each.of_call(i) for each in lists]) for i in numbers]
            is_list = isinstance(calls[0], list)
            same = zip(*calls, strict=True) if is_list else [calls]
            unfolded = [torch.stack(list(results))[:count] for results in same]
            out_dims = [0] * len(unfolded)
        return (unfolded, out_dims) if is_list else (unfolded[0], out_dims[0])

    operator.register_vmap(rule)
    older_vmap.register(operator)


def _unfolded(result: Tensor, at: int | None, count: int) -> Tensor:
    if at is None:
        return result
    before, after = result.shape[:at], result.shape[at + 1 :]
    return result.reshape(*before, count, result.shape[at] // count, *after)


_register(inference, _inference)
_register(forward, _forward)
_register(backward, _backward)
_register(step, _step, _sizes_of_step)
_register(step_backward, _step_backward, _sizes_of_step)
_register(extension, _step, _sizes_of_step)
