"""PyTorch: a backend's forward and backward as custom operators.

Three operators serve every backend and every piece: `forward` with residuals for the gradient,
`backward`, and `inference` without residuals. `step` and `step_backward` serve extensions of caches
that are states. A piece is passed as its text and a backend as its name, so that compiled and
exported graphs contain only strings and tensors. Autograd is registered for `forward` and `step`
only: PyTorch refuses a second derivative through a backend; `backend="reference"`, which is plain
differentiable code, has it.

vmap folds the mapped axis into the batch axis, which every input except weights has; the gradient
of a mapped call works the same way. Transforms for which custom operators have no rule
(torch.func.grad, several cotangents at once) are refused by PyTorch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from precondattn.algebra.group import read_mechanism
from precondattn.arrays import cast, wants_gradient
from precondattn.backend import ArraySpec
from precondattn.cache import Replace
from precondattn.dispatch.discovery import discover
from precondattn.dispatch.plan import PlannedCall
from precondattn.execution.autocast import off
from precondattn.frame import Frame


def _without_autocast(operator: Any) -> Any:
    """The operator's function with autocast off, whoever calls it: autograd, or a saved graph."""

    @functools.wraps(operator)
    def function(piece: str, backend: str, tensors: list[Tensor], *rest: Any) -> Any:
        with off(tensors[0]):
            return operator(piece, backend, tensors, *rest)

    return function


def apply(planned: PlannedCall, inputs: dict[str, Tensor], frame: Frame) -> Tensor:
    """The output of a planned call, differentiable in its inputs."""
    piece, backend = str(planned.piece), planned.backend.name
    tensors, masks = list(inputs.values()), list(frame.arrays)
    if wants_gradient(*tensors):
        return forward(piece, backend, tensors, masks)[0]
    return inference(piece, backend, tensors, masks)


def _named(piece: Any, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(piece.inputs, tensors, strict=True))


def _output_dtype(backend: str, inputs: dict[str, Tensor]) -> torch.dtype:
    """The dtype of a piece's output: that of v, but float32 for half precision if values are wide.

    So the next piece, and the cotangent of this one, are not rounded to half precision first.
    """
    values = inputs["v"] if "v" in inputs else next(iter(inputs.values()))
    is_half = values.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if is_half and discover().named(backend).wide_values else values.dtype


def _unaliased(outputs: Sequence[Tensor], inputs: Sequence[Tensor | None]) -> list[Tensor]:
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
@_without_autocast
def forward(
    piece: str, backend: str, tensors: list[Tensor], frame: list[Tensor | None]
) -> list[Tensor]:
    """The output, followed by the residuals."""
    mechanism = read_mechanism(piece)
    inputs = _named(mechanism, tensors)
    out, residuals = discover().named(backend).forward(mechanism, inputs, Frame(*frame))
    out = cast(out, _output_dtype(backend, inputs))
    return _unaliased([out, *residuals], [*tensors, *frame])


@torch.library.custom_op("precondattn::inference", mutates_args=())
@_without_autocast
def inference(
    piece: str, backend: str, tensors: list[Tensor], frame: list[Tensor | None]
) -> Tensor:
    """The output alone."""
    mechanism = read_mechanism(piece)
    inputs = _named(mechanism, tensors)
    out, _ = discover().named(backend).forward(mechanism, inputs, Frame(*frame))
    out = cast(out, _output_dtype(backend, inputs))
    return _unaliased([out], [*tensors, *frame])[0]


@torch.library.custom_op("precondattn::backward", mutates_args=())
@_without_autocast
def backward(
    piece: str,
    backend: str,
    tensors: list[Tensor],
    frame: list[Tensor | None],
    outputs: list[Tensor],
    cotangent: Tensor,
) -> list[Tensor]:
    """The gradient of every tensor."""
    mechanism = read_mechanism(piece)
    gradients = (
        discover()
        .named(backend)
        .backward(
            mechanism,
            _named(mechanism, tensors),
            Frame(*frame),
            outputs[0],
            tuple(outputs[1:]),
            cotangent,
        )
    )
    in_order = [
        gradients[name].to(tensor.dtype)
        for name, tensor in zip(mechanism.inputs, tensors, strict=True)
    ]
    return _unaliased(in_order, [*tensors, *frame, *outputs, cotangent])


# ------------------------------------------------------------------------- shapes, for tracing


def _output_like(mechanism: Any, backend: str, tensors: Sequence[Tensor]) -> Tensor:
    inputs = _named(mechanism, tensors)
    shapes = {n: tuple(t.shape) for n, t in inputs.items()}
    sizes = mechanism.inputs.sizes(str(mechanism), shapes)
    dtype = _output_dtype(backend, inputs)
    return tensors[0].new_empty(mechanism.program.output.shape(sizes), dtype=dtype)


@forward.register_fake
def _(piece: str, backend: str, tensors: Any, frame: Any) -> list[Tensor]:
    mechanism = read_mechanism(piece)
    specs = {
        name: ArraySpec(tuple(t.shape), str(t.dtype).removeprefix("torch."))
        for name, t in _named(mechanism, tensors).items()
    }
    residuals = discover().named(backend).residual_shapes(mechanism, specs, Frame(*frame))
    return [
        _output_like(mechanism, backend, tensors),
        *(tensors[0].new_empty(r.shape, dtype=getattr(torch, r.dtype)) for r in residuals),
    ]


@inference.register_fake
def _(piece: str, backend: str, tensors: Any, frame: Any) -> Tensor:
    return _output_like(read_mechanism(piece), backend, tensors)


@backward.register_fake
def _(
    piece: str, backend: str, tensors: Any, frame: Any, outputs: Any, cotangent: Any
) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]


# ----------------------------------------------------------------------------------- autograd


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.piece, ctx.backend, tensors, frame = inputs
    ctx.split = len(tensors), len(tensors) + len(frame)
    ctx.save_for_backward(*tensors, *frame, *output)


def _differentiate(ctx: Any, cotangents: Any) -> Any:
    saved, (end, split) = list(ctx.saved_tensors), ctx.split
    tensors, frame, outputs = saved[:end], saved[end:split], saved[split:]
    gradients = backward(ctx.piece, ctx.backend, tensors, frame, outputs, cotangents[0])
    # Autograd treats a list that contains None as one argument, and a list of tensors as many.
    no_gradient = None if any(mask is None for mask in frame) else [None] * len(frame)
    return None, None, gradients, no_gradient


forward.register_autograd(_differentiate, setup_context=_remember)


# ---------------------------------------------------------------------------- steps of states


def apply_step(
    planned: PlannedCall, past: dict[str, Tensor], inputs: dict[str, Tensor], frame: Frame
) -> tuple[Tensor, dict[str, Replace]]:
    """A step that replaces the states of a cache, differentiable in them and in the inputs."""
    piece, backend = str(planned.piece), planned.backend.name
    out, *states = step(
        piece, backend, list(past.values()), list(inputs.values()), list(frame.arrays)
    )
    return out, {name: Replace(state) for name, state in zip(past, states, strict=True)}


def _past_named(piece: Any, states: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(piece.program.slots, states, strict=True))


@torch.library.custom_op("precondattn::step", mutates_args=())
@_without_autocast
def step(
    piece: str,
    backend: str,
    past: list[Tensor],
    tensors: list[Tensor],
    frame: list[Tensor | None],
) -> list[Tensor]:
    """The output, followed by the new states."""
    mechanism = read_mechanism(piece)
    states = _past_named(mechanism, past)
    inputs = _named(mechanism, tensors)
    out, updates = discover().named(backend).step(mechanism, states, inputs, Frame(*frame))
    out = cast(out, _output_dtype(backend, inputs))
    replaced: dict[str, Any] = dict(updates)
    new = [cast(replaced[name].value, old.dtype) for name, old in states.items()]
    return _unaliased([out, *new], [*past, *tensors, *frame])


@torch.library.custom_op("precondattn::step_backward", mutates_args=())
@_without_autocast
def step_backward(
    piece: str,
    backend: str,
    past: list[Tensor],
    tensors: list[Tensor],
    frame: list[Tensor | None],
    cotangents: list[Tensor],
) -> list[Tensor]:
    """The gradients of the old states, followed by those of every tensor."""
    mechanism = read_mechanism(piece)
    states, inputs = _past_named(mechanism, past), _named(mechanism, tensors)
    gradients, d_past = (
        discover()
        .named(backend)
        .step_backward(
            mechanism,
            states,
            inputs,
            Frame(*frame),
            cotangents[0],
            _past_named(mechanism, cotangents[1:]),
        )
    )
    in_order = [cast(d_past[name], old.dtype) for name, old in states.items()]
    in_order += [cast(gradients[name], tensor.dtype) for name, tensor in inputs.items()]
    return _unaliased(in_order, [*past, *tensors, *frame, *cotangents])


@step.register_fake
def _(piece: str, backend: str, past: Any, tensors: Any, frame: Any) -> list[Tensor]:
    mechanism = read_mechanism(piece)
    named = _named(mechanism, tensors)
    shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
    sizes = mechanism.inputs.extending().sizes(str(mechanism), shapes)
    shape = mechanism.program.output.renamed({"s": "t"}).shape(sizes)
    out = tensors[0].new_empty(shape, dtype=_output_dtype(backend, named))
    return [out, *(torch.empty_like(state) for state in past)]


@step_backward.register_fake
def _(
    piece: str, backend: str, past: Any, tensors: Any, frame: Any, cotangents: Any
) -> list[Tensor]:
    contiguous = torch.contiguous_format
    return [torch.empty_like(t, memory_format=contiguous) for t in (*past, *tensors)]


def _remember_step(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.piece, ctx.backend, past, tensors, frame = inputs
    ctx.split = len(past), len(past) + len(tensors)
    ctx.save_for_backward(*past, *tensors, *frame)


def _differentiate_step(ctx: Any, cotangents: Any) -> Any:
    saved, (end, split) = list(ctx.saved_tensors), ctx.split
    past, tensors, frame = saved[:end], saved[end:split], saved[split:]
    gradients = step_backward(ctx.piece, ctx.backend, past, tensors, frame, list(cotangents))
    no_gradient = None if any(mask is None for mask in frame) else [None] * len(frame)
    return None, None, gradients[:end], gradients[end:], no_gradient


step.register_autograd(_differentiate_step, setup_context=_remember_step)


# --------------------------------------------------------------------------------------- vmap


def _fold(count: int, tensor: Tensor | None, axis: int | None, has_batch: bool) -> Tensor | None:
    """A mapped tensor with the mapped axis folded into its batch axis, which comes first."""
    if tensor is None:
        return None
    if not has_batch:
        if axis is not None:
            raise NotImplementedError(
                "vmap over an input without a batch axis is not supported by this backend; "
                'use backend="reference"'
            )
        return tensor
    tensor = (
        tensor.movedim(axis, 0)
        if axis is not None
        else tensor.unsqueeze(0).expand(count, *tensor.shape)
    )
    return tensor.reshape(count * tensor.shape[1], *tensor.shape[2:])


def _fold_all(info: Any, axes: Any, tensors: Any, frame: Any, piece: str) -> tuple[Any, Any]:
    """Tensors and frame of the folded call; a batch axis of size 1 is first expanded to b."""
    mechanism, count = read_mechanism(piece), info.batch_size

    def inner(tensor: Tensor | None, axis: int | None) -> tuple[int, ...]:
        shape = list(tensor.shape) if tensor is not None else [1]
        if axis is not None:
            del shape[axis]
        return tuple(shape)

    patterns = list(mechanism.inputs.values())
    lead = [p.letters[:1] == "b" for p in patterns]
    b = max(inner(t, a)[0] for t, a, has in zip(tensors, axes[2], lead, strict=True) if has)

    def fold(tensor: Any, axis: Any, has_batch: bool) -> Any:
        if tensor is not None and has_batch and inner(tensor, axis)[0] == 1 and b > 1:
            at = 0 if axis is None else (1 if axis == 0 else 0)
            tensor = tensor.expand(*[b if i == at else n for i, n in enumerate(tensor.shape)])
        return _fold(count, tensor, axis, has_batch)

    folded = [fold(t, a, has) for t, a, has in zip(tensors, axes[2], lead, strict=True)]
    masks = [fold(t, a, True) for t, a in zip(frame, axes[3], strict=True)]
    return folded, masks


def _unfold(count: int, tensor: Tensor) -> Tensor:
    return tensor.reshape(count, tensor.shape[0] // count, *tensor.shape[1:])


@forward.register_vmap
def _(info: Any, in_dims: Any, piece: str, backend: str, tensors: Any, frame: Any) -> Any:
    folded, masks = _fold_all(info, in_dims, tensors, frame, piece)
    outputs = forward(piece, backend, folded, masks)
    return [_unfold(info.batch_size, o) for o in outputs], [0] * len(outputs)


@inference.register_vmap
def _(info: Any, in_dims: Any, piece: str, backend: str, tensors: Any, frame: Any) -> Any:
    folded, masks = _fold_all(info, in_dims, tensors, frame, piece)
    return _unfold(info.batch_size, inference(piece, backend, folded, masks)), 0
