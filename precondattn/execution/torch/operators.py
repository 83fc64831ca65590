"""PyTorch: a backend's forward and backward as custom operators, and their shapes.

Three operators serve every backend and every piece in full calls: `forward` with residuals for the
gradient, `backward`, and `inference` without residuals. A piece is passed by its name
(`algebra/names.py`), a backend by its own and a frame as its layout's text and its arrays, so that
compiled and exported graphs contain only strings and tensors.

Under a compiler sizes may be symbols. An operator is not traced into, so the loops of an algorithm
over blocks of tokens do not appear in the graph, and its choices that depend on a length are made
when it runs. A plan is made while tracing; a backend that compares a symbolic length there makes
PyTorch compile again for the other outcome, which is slow but never wrong. Residuals are outputs of
`forward`, with the shapes that the backend declares in terms of the sizes of the inputs. So nothing
is computed twice, and no memory is needed beyond that of an uncompiled call. Only the reference
declares none: it is an operator only where sizes are symbols, and computes the forward pass again
in the gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from precondattn.algebra.names import piece_named
from precondattn.algebra.piece import Piece
from precondattn.arrays import Tree, cast
from precondattn.backend import ArraySpec, runner_of
from precondattn.dispatch.discovery import REFERENCE, Discovered, discover
from precondattn.execution.cotangents import gradients_at
from precondattn.execution.torch.autocast import off
from precondattn.execution.torch.frames import frame_of
from precondattn.execution.torch.outputs import output_dtype, unaliased, values_of
from precondattn.limits import KEPT
from precondattn.runner import Runner


class Named(NamedTuple):
    """What the texts of an operator name."""

    piece: Piece
    runner: Runner
    is_wide: bool
    """Whether the backend has `wide_values`."""
    is_reference: bool


def named(piece: str, backend: str) -> Named:
    """The piece and what runs it, found once for the backends that are known."""
    return _named(piece, backend, discover())


@lru_cache(KEPT)
def _named(piece: str, backend: str, discovered: Discovered) -> Named:
    found, runs = piece_named(piece), discovered.named(backend)
    return Named(found, runner_of(runs, found, "torch"), runs.wide_values, runs is REFERENCE)


def without_autocast(operator: Callable[..., Tree]) -> Callable[..., Tree]:
    """The operator's function with autocast off, whoever calls it: autograd, or a saved graph."""

    @functools.wraps(operator)
    def function(piece: str, backend: str, tensors: list[Tensor], *rest: Tree) -> Tree:
        # A piece that needs no cache has no buffers, and a step has the inputs after them.
        with off(tensors[0] if tensors else rest[0][0]):
            return operator(piece, backend, tensors, *rest)

    return function


def named_inputs(piece: Piece, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(piece.inputs, tensors, strict=True))


@torch.library.custom_op("precondattn::forward", mutates_args=())
@without_autocast
def forward(
    piece: str, backend: str, tensors: list[Tensor], frame: list[Tensor | None], layout: str = ""
) -> list[Tensor]:
    """The output, followed by the residuals."""
    found = named(piece, backend)
    inputs = named_inputs(found.piece, tensors)
    out, residuals = found.runner.forward_with_residuals(
        inputs, frame_of(layout, frame, tensors[0])
    )
    out = cast(out, output_dtype(inputs, is_wide=found.is_wide, has_gradient=True))
    kept = () if found.is_reference else residuals
    return unaliased([out, *kept], [*tensors, *frame])


@torch.library.custom_op("precondattn::inference", mutates_args=())
@without_autocast
def inference(
    piece: str, backend: str, tensors: list[Tensor], frame: list[Tensor | None], layout: str = ""
) -> Tensor:
    """The output alone."""
    found = named(piece, backend)
    inputs = named_inputs(found.piece, tensors)
    out, _ = found.runner.forward(inputs, frame_of(layout, frame, tensors[0]))
    dtype = output_dtype(inputs, is_wide=found.is_wide)
    return unaliased([cast(out, dtype)], [*tensors, *frame])[0]


@torch.library.custom_op("precondattn::backward", mutates_args=())
@without_autocast
def backward(
    piece: str,
    backend: str,
    tensors: list[Tensor],
    frame: list[Tensor | None],
    outputs: list[Tensor],
    cotangent: Tensor,
    layout: str = "",
) -> list[Tensor]:
    """The gradient of every tensor."""
    found, masks = named(piece, backend), frame_of(layout, frame, tensors[0])
    inputs = named_inputs(found.piece, tensors)
    out, residuals = outputs[0], tuple(outputs[1:])
    if found.is_reference:
        out, residuals = found.runner.forward(inputs, masks)
    if not found.is_wide:
        out = cast(out, values_of(inputs).dtype)
    gradients = gradients_at(cotangent, found.runner, inputs, masks, out, residuals)
    in_order = [gradients[name].to(tensor.dtype) for name, tensor in inputs.items()]
    return unaliased(in_order, [*tensors, *frame, *outputs, cotangent])


# ------------------------------------------------------------------------- shapes, for tracing


def _output_like(found: Named, tensors: Sequence[Tensor], *, has_gradient: bool = False) -> Tensor:
    mechanism, inputs = found.piece, named_inputs(found.piece, tensors)
    shapes = {n: tuple(t.shape) for n, t in inputs.items()}
    shape = mechanism.program.output.shape(mechanism.inputs.sizes(str(mechanism), shapes))
    dtype = output_dtype(inputs, is_wide=found.is_wide, has_gradient=has_gradient)
    return tensors[0].new_empty(shape, dtype=dtype)


@forward.register_fake
def _(
    piece: str, backend: str, tensors: Tree, frame: Sequence[Tensor | None], layout: str = ""
) -> list[Tensor]:
    found = named(piece, backend)
    specs = {name: ArraySpec.of(t) for name, t in named_inputs(found.piece, tensors).items()}
    residuals = found.runner.residual_shapes(specs, frame_of(layout, frame, tensors[0]))
    return [
        _output_like(found, tensors, has_gradient=True),
        *(tensors[0].new_empty(r.shape, dtype=getattr(torch, r.dtype)) for r in residuals),
    ]


@inference.register_fake
def _(piece: str, backend: str, tensors: Tree, *rest: Tree) -> Tensor:
    return _output_like(named(piece, backend), tensors)


@backward.register_fake
def _(piece: str, backend: str, tensors: Tree, *rest: Tree) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
