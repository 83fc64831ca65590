"""The vmap rule of the operators: mapped calls become one call with more sequences or heads.

`folded_axes.py` finds the axes. An array that is not mapped is repeated, because each call has its
own gradient of it. If no axis can be folded into, the calls are made one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from precondattn.algebra.declaration import Pattern
from precondattn.algebra.group import piece_named
from precondattn.arrays import Tree
from precondattn.frameworks.torch import folded_axes, legacy_vmap, operators
from precondattn.frameworks.torch.folded_axes import MappedArrays, OneCall, SeparateCallsError

SEQUENCES = (Pattern.read("b"),)

VmapAxes = tuple[list[folded_axes.AxesOf], folded_axes.AxesOf]
"""The axes into which the mapped axis is folded: a list of axes for each argument, which is a list
of arrays, and the axes of the results."""


def _inference(call: OneCall) -> VmapAxes:
    return [call.of_inputs(), call.of_frame()], [call.of_output()]


def _forward(call: OneCall) -> VmapAxes:
    return [call.of_inputs(), call.of_frame()], [call.of_output(), *call.of_residuals()]


def _backward(call: OneCall, outputs: MappedArrays, cotangent: MappedArrays) -> VmapAxes:
    gradients, out = call.of_inputs(each=True), call.of_output()
    residuals = call.of_residuals(outputs.shapes[1:])
    return [gradients, call.of_frame(), [out, *residuals], [out]], gradients


def _step(call: OneCall, past: MappedArrays, *counts: MappedArrays) -> VmapAxes:
    buffers = call.of_buffers(past)
    axes = [buffers, call.of_inputs(), call.of_frame()]
    axes += [call.axes_of(SEQUENCES, each) for each in counts]
    return axes, [call.of_output(), *buffers]


def _step_backward(call: OneCall, past: MappedArrays, cotangents: MappedArrays) -> VmapAxes:
    states, gradients = call.of_buffers(past), call.of_inputs(each=True)
    axes = [states, gradients, call.of_frame(), [call.of_output(), *states]]
    return axes, states + gradients


def _register(operator: Tree, axes_of: Callable[..., VmapAxes], *, is_step: bool = False) -> None:
    def one_call(
        name: str, backend: str, lists: list[MappedArrays], count: int, layout: str
    ) -> VmapAxes | None:
        piece = piece_named(name)
        declared = piece.inputs.extending() if is_step else piece.inputs
        past = [lists.pop(0)] if is_step else []
        tensors, frame, *others = lists
        sizes = declared.sizes(str(piece), dict(zip(declared, tensors.shapes, strict=True)))
        for kind in folded_axes.KINDS:
            with suppress(SeparateCallsError):
                call = OneCall(piece, sizes, kind, count, backend, tensors, frame, layout)
                return axes_of(call, *past, *others)
        return None

    def rule(info: Tree, in_dims: Tree, piece: str, backend: str, *rest: Tree) -> Tree:
        count = info.batch_size
        # PyTorch does not pass an argument that equals its default.
        *arguments, layout = rest if isinstance(rest[-1], str) else (*rest, "")
        lists = [
            MappedArrays(array, axis) if isinstance(array, list) else MappedArrays([array], [axis])
            for array, axis in zip(arguments, in_dims[2:], strict=False)
        ]

        def results_of(arrays: Sequence[list[Tree]]) -> list[Tensor]:
            pairs = zip(arguments, arrays, strict=True)
            new = (each if isinstance(old, list) else each[0] for old, each in pairs)
            results = operator(piece, backend, *new, layout)
            return results if isinstance(results, list) else [results]

        axes = one_call(piece, backend, [*lists], count, layout) if count > 1 else None
        if axes is not None:
            of_arguments, out_dims = axes
            folds = zip(lists, of_arguments, strict=True)
            results = results_of([each.folded(at, count) for each, at in folds])
            unfolded = [_unfolded(*pair, count) for pair in zip(results, out_dims, strict=True)]
        else:  # With no calls, one call of zeros gives the shapes.
            calls = [results_of([each.of_call(i) for each in lists]) for i in range(max(count, 1))]
            unfolded = [torch.stack(same)[:count] for same in zip(*calls, strict=True)]
            out_dims = [0] * len(unfolded)
        is_one = operator is operators.inference
        return (unfolded[0], out_dims[0]) if is_one else (unfolded, out_dims)

    operator.register_vmap(rule)
    legacy_vmap.register(operator)


def _unfolded(result: Tensor, at: int | None, count: int) -> Tensor:
    if at is None:
        return result
    before, after = result.shape[:at], result.shape[at + 1 :]
    return result.reshape(*before, count, result.shape[at] // count, *after)


_register(operators.inference, _inference)
_register(operators.forward, _forward)
_register(operators.backward, _backward)
_register(operators.step, _step, is_step=True)
_register(operators.step_backward, _step_backward, is_step=True)
_register(operators.extension, _step, is_step=True)
