"""PyTorch: a backend's forward and backward as custom operators, and their shapes.

Three operators serve every backend and every piece in full calls: `forward` with residuals for the
gradient, `backward`, and `inference` without residuals. A piece is passed by its name
(`algebra/names.py`) and a backend by its own, so that compiled and exported graphs contain only
strings and tensors.

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
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from precondattn.algebra.names import piece_named
from precondattn.arrays import cast
from precondattn.backend import ArraySpec
from precondattn.dispatch.discovery import REFERENCE, discover
from precondattn.execution.cotangents import gradients_at
from precondattn.execution.torch.autocast import off
from precondattn.frame import Frame


def without_autocast(operator: Any) -> Any:
    """The operator's function with autocast off, whoever calls it: autograd, or a saved graph."""

    @functools.wraps(operator)
    def function(piece: str, backend: str, tensors: list[Tensor], *rest: Any) -> Any:
        # A piece that needs no cache has no buffers, and a step has the inputs after them.
        with off(tensors[0] if tensors else rest[0][0]):
            return operator(piece, backend, tensors, *rest)

    return function


def named_inputs(piece: Any, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(piece.inputs, tensors, strict=True))


def values_of(inputs: dict[str, Tensor]) -> Tensor:
    """v, or the first input: it has the dtype of the call's output."""
    return inputs["v"] if "v" in inputs else next(iter(inputs.values()))


def output_dtype(
    backend: str, inputs: dict[str, Tensor], *, has_gradient: bool = False
) -> torch.dtype:
    """The dtype of a piece's output: that of v, but float32 for half precision if values are wide.

    So the next piece, and the cotangent of this one, are not rounded to half precision first. For
    its cotangent's sake an output with a gradient is never in float16 (`cotangents.py`).
    """
    dtype = values_of(inputs).dtype
    is_half = dtype in (torch.float16, torch.bfloat16)
    is_wide = is_half and discover().named(backend).wide_values
    return torch.float32 if is_wide or (has_gradient and dtype == torch.float16) else dtype


def unaliased(outputs: Sequence[Tensor], inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """The outputs, copied where one shares memory with an input or another output."""
    used = {t.untyped_storage().data_ptr() for t in inputs if t is not None}
    unaliased = []
    for output in outputs:
        if output.untyped_storage().data_ptr() in used:
            output = output.clone()
        used.add(output.untyped_storage().data_ptr())
        unaliased.append(output.contiguous())
    return unaliased


@torch.library.custom_op("precondattn::forward", mutates_args=())
@without_autocast
def forward(
    piece: str, backend: str, tensors: list[Tensor], frame: list[Tensor | None]
) -> list[Tensor]:
    """The output, followed by the residuals."""
    mechanism, runs = piece_named(piece), discover().named(backend)
    # A registered object need not be a subclass of `Backend`.
    run = getattr(runs, "forward_with_residuals", runs.forward)
    inputs = named_inputs(mechanism, tensors)
    out, residuals = run(mechanism, inputs, Frame(*frame))
    out = cast(out, output_dtype(backend, inputs, has_gradient=True))
    kept = () if runs is REFERENCE else residuals
    return unaliased([out, *kept], [*tensors, *frame])


@torch.library.custom_op("precondattn::inference", mutates_args=())
@without_autocast
def inference(
    piece: str, backend: str, tensors: list[Tensor], frame: list[Tensor | None]
) -> Tensor:
    """The output alone."""
    mechanism, runs = piece_named(piece), discover().named(backend)
    inputs = named_inputs(mechanism, tensors)
    out, _ = runs.forward(mechanism, inputs, Frame(*frame))
    return unaliased([cast(out, output_dtype(backend, inputs))], [*tensors, *frame])[0]


@torch.library.custom_op("precondattn::backward", mutates_args=())
@without_autocast
def backward(
    piece: str,
    backend: str,
    tensors: list[Tensor],
    frame: list[Tensor | None],
    outputs: list[Tensor],
    cotangent: Tensor,
) -> list[Tensor]:
    """The gradient of every tensor."""
    mechanism, runs = piece_named(piece), discover().named(backend)
    inputs, masks, out, residuals = (
        named_inputs(mechanism, tensors),
        Frame(*frame),
        outputs[0],
        tuple(outputs[1:]),
    )
    if runs is REFERENCE:
        out, residuals = runs.forward(mechanism, inputs, masks)
    if not runs.wide_values:
        out = cast(out, values_of(inputs).dtype)
    gradients = gradients_at(cotangent, runs, mechanism, inputs, masks, out, residuals)
    in_order = [gradients[name].to(tensor.dtype) for name, tensor in inputs.items()]
    return unaliased(in_order, [*tensors, *frame, *outputs, cotangent])


# ------------------------------------------------------------------------- shapes, for tracing


def _output_like(
    mechanism: Any, backend: str, tensors: Sequence[Tensor], *, has_gradient: bool = False
) -> Tensor:
    inputs = named_inputs(mechanism, tensors)
    shapes = {n: tuple(t.shape) for n, t in inputs.items()}
    shape = mechanism.program.output.shape(mechanism.inputs.sizes(str(mechanism), shapes))
    dtype = output_dtype(backend, inputs, has_gradient=has_gradient)
    return tensors[0].new_empty(shape, dtype=dtype)


@forward.register_fake
def _(piece: str, backend: str, tensors: Any, frame: Any) -> list[Tensor]:
    mechanism = piece_named(piece)
    specs = {name: ArraySpec.of(t) for name, t in named_inputs(mechanism, tensors).items()}
    residuals = discover().named(backend).residual_shapes(mechanism, specs, Frame(*frame))
    return [
        _output_like(mechanism, backend, tensors, has_gradient=True),
        *(tensors[0].new_empty(r.shape, dtype=getattr(torch, r.dtype)) for r in residuals),
    ]


@inference.register_fake
def _(piece: str, backend: str, tensors: Any, frame: Any) -> Tensor:
    return _output_like(piece_named(piece), backend, tensors)


@backward.register_fake
def _(
    piece: str, backend: str, tensors: Any, frame: Any, outputs: Any, cotangent: Any
) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
