"""PyTorch: extensions of caches as custom operators.

`step` and `step_backward` serve differentiated steps of caches that are states. `extension` serves
a step of any cache without a gradient, where a compiler traces it with symbolic sizes: its loops
over blocks of tokens would otherwise be unrolled, and compiled again for every length. With sizes
that are numbers, such as one token, the step itself is traced, and the compiler can fuse it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from precondattn.algebra.piece import Piece
from precondattn.arrays import Arrays, Tree, cast
from precondattn.cache import updated
from precondattn.execution.cotangents import step_gradients_at
from precondattn.execution.torch.frames import frame_of
from precondattn.execution.torch.operators import (
    Named,
    named,
    named_inputs,
    without_autocast,
)
from precondattn.execution.torch.outputs import output_dtype, unaliased, values_of


def named_buffers(piece: Piece, buffers: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(piece.program.slots, buffers, strict=True))


@torch.library.custom_op("precondattn::step", mutates_args=())
@without_autocast
def step(
    piece: str,
    backend: str,
    past: list[Tensor],
    tensors: list[Tensor],
    frame: list[Tensor | None],
    layout: str = "",
) -> list[Tensor]:
    """The output, followed by the new states."""
    found = named(piece, backend)
    states, inputs = named_buffers(found.piece, past), named_inputs(found.piece, tensors)
    out, updates = found.runner.step(states, inputs, frame_of(layout, frame, tensors[0]))
    out = cast(out, output_dtype(inputs, is_wide=found.is_wide, has_gradient=True))
    replaced: Arrays = dict(updates)
    new = [cast(replaced[name].value, old.dtype) for name, old in states.items()]
    return unaliased([out, *new], [*past, *tensors, *frame])


@torch.library.custom_op("precondattn::step_backward", mutates_args=())
@without_autocast
def step_backward(
    piece: str,
    backend: str,
    past: list[Tensor],
    tensors: list[Tensor],
    frame: list[Tensor | None],
    cotangents: list[Tensor],
    layout: str = "",
) -> list[Tensor]:
    """The gradients of the old states, followed by those of every tensor."""
    found = named(piece, backend)
    states, inputs = named_buffers(found.piece, past), named_inputs(found.piece, tensors)
    d_out, d_states = cotangents[0], named_buffers(found.piece, cotangents[1:])
    like = d_out if found.is_wide else values_of(inputs)
    gradients, d_past = step_gradients_at(
        d_out, d_states, found.runner, states, inputs, frame_of(layout, frame, tensors[0]), like
    )
    in_order = [cast(d_past[name], old.dtype) for name, old in states.items()]
    in_order += [cast(gradients[name], tensor.dtype) for name, tensor in inputs.items()]
    return unaliased(in_order, [*past, *tensors, *frame, *cotangents])


@torch.library.custom_op("precondattn::extension", mutates_args=())
@without_autocast
def extension(
    piece: str,
    backend: str,
    past: list[Tensor],
    tensors: list[Tensor],
    frame: list[Tensor | None],
    length: Tensor,
    count: Tensor,
    layout: str = "",
) -> list[Tensor]:
    """The output, followed by the updated buffers, in the memory layout of the old ones."""
    found = named(piece, backend)
    buffers, inputs = named_buffers(found.piece, past), named_inputs(found.piece, tensors)
    out, updates = found.runner.step(buffers, inputs, frame_of(layout, frame, tensors[0]))
    out = cast(out, output_dtype(inputs, is_wide=found.is_wide))
    (out,) = unaliased([out], [*past, *tensors, *frame])
    new = [
        updated(old, updates[name], length, count, donate=False) for name, old in buffers.items()
    ]
    return [out, *(torch.empty_like(old).copy_(each) for old, each in zip(past, new, strict=True))]


# ------------------------------------------------------------------------- shapes, for tracing


def _output_like(found: Named, tensors: Sequence[Tensor], *, has_gradient: bool = False) -> Tensor:
    mechanism, inputs = found.piece, named_inputs(found.piece, tensors)
    shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
    sizes = mechanism.inputs.extending().sizes(str(mechanism), shapes)
    shape = mechanism.program.output.renamed({"s": "t"}).shape(sizes)
    dtype = output_dtype(inputs, is_wide=found.is_wide, has_gradient=has_gradient)
    return tensors[0].new_empty(shape, dtype=dtype)


@step.register_fake
def _(piece: str, backend: str, past: Tree, tensors: Tree, *rest: Tree) -> list[Tensor]:
    contiguous = torch.contiguous_format
    new = [torch.empty_like(state, memory_format=contiguous) for state in past]
    return [_output_like(named(piece, backend), tensors, has_gradient=True), *new]


@step_backward.register_fake
def _(piece: str, backend: str, past: Tree, tensors: Tree, *rest: Tree) -> list[Tensor]:
    contiguous = torch.contiguous_format
    return [torch.empty_like(t, memory_format=contiguous) for t in (*past, *tensors)]


@extension.register_fake
def _(piece: str, backend: str, past: Tree, tensors: Tree, *rest: Tree) -> list[Tensor]:
    return [
        _output_like(named(piece, backend), tensors),
        *(torch.empty_like(each) for each in past),
    ]
