"""PyTorch: the methods of a runner as custom operators, and the shapes of their results.

Three operators serve every backend and every piece in full calls: `forward` with residuals for the
gradient, `backward`, and `inference` without residuals. `step` and `step_backward` serve
differentiated steps of caches of states. `extension` serves steps of any cache without a gradient
if sizes are symbolic. A step whose sizes are numbers, such as one token, is traced, so that a
compiler can fuse it.

A piece is passed by its name (`algebra/names.py`), a backend by its name, and a frame as the text
of its layout and its arrays. So compiled and exported graphs contain only strings and tensors. If
the text is empty, only the arrays are known. Lengths of caches and symbolic sizes, which a compiler
does not know, are read when the operator runs.

A compiler does not trace into an operator. So an algorithm's loops over blocks of tokens are
neither unrolled nor compiled again for every length. The plan is made while tracing; if a backend
compares a symbolic length then, PyTorch compiles again for the other outcome. Residuals are outputs
of `forward`, with shapes that the backend declares. Only the reference declares none: it is an
operator only if sizes are symbolic, and its gradient computes the forward pass again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from precondattn.algebra.group import piece_named
from precondattn.algebra.piece import Piece
from precondattn.arrays import Arrays, Tree, cast, device_of, host_integers
from precondattn.backend import ArraySpec, Backend, Request, Runner, UnsupportedError
from precondattn.cache import updated
from precondattn.dispatch.discovery import REFERENCE, Discovered, discover
from precondattn.execution.array_checks import call_dtype, values_of
from precondattn.execution.cotangents import gradients_at, step_gradients_at
from precondattn.execution.input_names import shapes_of
from precondattn.frame import EXTENSION, OF_TOKENS, UNKNOWN, Frame, Layout, held_by_all, rebuilt
from precondattn.frameworks.torch.autocast import off
from precondattn.limits import KEPT

Tensors = list[Tensor]
Masks = list[Tensor | None]


class Named(NamedTuple):
    """The objects that the texts of an operator name."""

    piece: Piece
    backend: Backend
    is_wide: bool
    is_reference: bool
    runners: dict[tuple[str, str, str], Runner]

    def runner(self, verb: str, inputs: dict[str, Tensor]) -> Runner:
        """The runner of a verb, prepared for the inputs of its first call."""
        key = verb, device_of(values_of(inputs)), call_dtype(inputs)
        if key not in self.runners:
            verb, device, dtype = key
            shapes = tuple(shapes_of(inputs).items())
            request = Request(verb, "torch", device, dtype, shapes, frozenset(), is_operator=True)
            answer = self.backend.prepare(self.piece, request)
            if isinstance(answer, str):
                raise UnsupportedError(f"{self.piece}: {self.backend.name} {answer}")
            self.runners[key] = answer
        return self.runners[key]

    def inputs(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.piece.inputs, tensors, strict=True))

    def buffers(self, past: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.piece.program.slots, past, strict=True))


def named(piece: str, backend: str) -> Named:
    """The piece and its runner, looked up once for each set of known backends."""
    return _named(piece, backend, discover())


@functools.lru_cache(KEPT)
def _named(piece: str, backend: str, discovered: Discovered) -> Named:
    runs = discovered.named(backend)
    return Named(piece_named(piece), runs, runs.wide_values, runs is REFERENCE, {})


@functools.lru_cache(maxsize=KEPT)
def text_of(layout: Layout) -> str:
    """A layout as a text like `"full:6:6:::lengths"`: kind, t, s, held, longest, masks."""
    if layout == UNKNOWN:
        return ""
    numbers = (layout.t, layout.s, layout.held, layout.longest)
    texts = ("" if number is None else str(number) for number in numbers)
    return ":".join((layout.kind, *texts, ",".join(sorted(layout.masks))))


@functools.lru_cache(maxsize=KEPT)
def layout_of(text: str) -> Layout:
    """The layout from a text of `text_of`."""
    if not text:
        return UNKNOWN
    kind, *numbers, masks = text.split(":")
    t, s, held, longest = (int(number) if number else None for number in numbers)
    return Layout(kind, t, s, frozenset(filter(None, masks.split(","))), held, longest)


def frame_of(text: str, tensors: Sequence[Tensor | None], like: Tensor) -> Frame:
    """The frame from the text of its layout and its `sources`, on the device of `like`."""
    layout = layout_of(text)
    if layout.kind and len(tensors) >= OF_TOKENS:
        layout = _found(layout, *tensors[:2])
    return rebuilt(layout, tensors, like)


def _found(layout: Layout, q_position: Tensor, k_position: Tensor) -> Layout:
    """The layout completed by the sizes that a compiler did not know."""
    t, s = q_position.shape[1], k_position.shape[1]
    if layout.kind == EXTENSION:
        s = s - t
    layout = layout._replace(t=t, s=s).without_symbols
    if layout.kind != EXTENSION or layout.longest is not None:
        return layout
    lengths = host_integers(q_position[:, 0])
    if lengths is None:
        return layout
    held = None if layout.masks else held_by_all(lengths, t, s)
    return layout._replace(held=held, longest=max(lengths, default=0))


def _operator(function: Callable[..., Tree]) -> Tree:
    """An operator with autocast off inside, also if autograd or a saved graph calls it."""

    @functools.wraps(function)
    def without_autocast(piece: str, backend: str, tensors: Tensors, *rest: Tree) -> Tree:
        # A piece without a cache has no buffers; the inputs of a step come after them.
        with off(tensors[0] if tensors else rest[0][0]):
            return function(piece, backend, tensors, *rest)

    name = f"precondattn::{function.__name__}"
    return torch.library.custom_op(name, without_autocast, mutates_args=())


def output_dtype(
    inputs: dict[str, Tensor], *, is_wide: bool, has_gradient: bool = False
) -> torch.dtype:
    """The dtype of a piece's output: v's dtype, or float32 for half precision if `is_wide`.

    An output with a gradient is never in float16, so that its cotangent is not (`cotangents.py`).
    """
    dtype = values_of(inputs).dtype
    if dtype == torch.bfloat16 and is_wide:
        return torch.float32
    return torch.float32 if dtype == torch.float16 and (is_wide or has_gradient) else dtype


def unaliased(outputs: Sequence[Tensor], inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """The outputs; one that shares memory with an input or another output is copied."""
    used = {t.untyped_storage().data_ptr() for t in inputs if t is not None}
    unaliased = []
    for output in outputs:
        if output.untyped_storage().data_ptr() in used:
            output = output.clone()
        used.add(output.untyped_storage().data_ptr())
        unaliased.append(output.contiguous())
    return unaliased


@_operator
def forward(piece: str, backend: str, tensors: Tensors, frame: Masks, layout: str = "") -> Tensors:
    """The output, followed by the residuals."""
    found, masks = named(piece, backend), frame_of(layout, frame, tensors[0])
    inputs = found.inputs(tensors)
    out, residuals = found.runner("vjp", inputs).forward_with_residuals(inputs, masks)
    out = cast(out, output_dtype(inputs, is_wide=found.is_wide, has_gradient=True))
    kept = () if found.is_reference else residuals
    return unaliased([out, *kept], [*tensors, *frame])


@_operator
def inference(piece: str, backend: str, tensors: Tensors, frame: Masks, layout: str = "") -> Tensor:
    """The output without residuals."""
    found, masks = named(piece, backend), frame_of(layout, frame, tensors[0])
    inputs = found.inputs(tensors)
    out, _ = found.runner("forward", inputs).forward(inputs, masks)
    out = cast(out, output_dtype(inputs, is_wide=found.is_wide))
    return unaliased([out], [*tensors, *frame])[0]


@_operator
def backward(
    piece: str,
    backend: str,
    tensors: Tensors,
    frame: Masks,
    outputs: Tensors,
    cotangent: Tensor,
    layout: str = "",
) -> Tensors:
    """The gradient of every input."""
    found, masks = named(piece, backend), frame_of(layout, frame, tensors[0])
    inputs = found.inputs(tensors)
    runner, out, residuals = found.runner("vjp", inputs), outputs[0], tuple(outputs[1:])
    if found.is_reference:
        out, residuals = runner.forward(inputs, masks)
    if not found.is_wide:
        out = cast(out, values_of(inputs).dtype)
    gradients = gradients_at(cotangent, runner, inputs, masks, out, residuals)
    in_order = [cast(gradients[name], tensor.dtype) for name, tensor in inputs.items()]
    return unaliased(in_order, [*tensors, *frame, *outputs, cotangent])


@_operator
def step(
    piece: str, backend: str, past: Tensors, tensors: Tensors, frame: Masks, layout: str = ""
) -> Tensors:
    """The output, followed by the new states."""
    found, masks = named(piece, backend), frame_of(layout, frame, tensors[0])
    states, inputs = found.buffers(past), found.inputs(tensors)
    out, updates = found.runner("extend", inputs).step(states, inputs, masks)
    out = cast(out, output_dtype(inputs, is_wide=found.is_wide, has_gradient=True))
    replaced: Arrays = dict(updates)
    new = [cast(replaced[name].value, old.dtype) for name, old in states.items()]
    return unaliased([out, *new], [*past, *tensors, *frame])


@_operator
def step_backward(
    piece: str,
    backend: str,
    past: Tensors,
    tensors: Tensors,
    frame: Masks,
    cotangents: Tensors,
    layout: str = "",
) -> Tensors:
    """The gradients of the old states, followed by the gradient of every input."""
    found, masks = named(piece, backend), frame_of(layout, frame, tensors[0])
    states, inputs = found.buffers(past), found.inputs(tensors)
    d_out, d_new = cotangents[0], found.buffers(cotangents[1:])
    like = d_out if found.is_wide else values_of(inputs)
    runner = found.runner("extend_vjp", inputs)
    gradients, d_past = step_gradients_at(d_out, d_new, runner, states, inputs, masks, like)
    in_order = [cast(d_past[name], old.dtype) for name, old in states.items()]
    in_order += [cast(gradients[name], tensor.dtype) for name, tensor in inputs.items()]
    return unaliased(in_order, [*past, *tensors, *frame, *cotangents])


@_operator
def extension(
    piece: str,
    backend: str,
    past: Tensors,
    tensors: Tensors,
    frame: Masks,
    length: Tensor,
    count: Tensor,
    layout: str = "",
) -> Tensors:
    """The output, followed by the updated buffers, in the memory layout of the old ones."""
    found, masks = named(piece, backend), frame_of(layout, frame, tensors[0])
    buffers, inputs = found.buffers(past), found.inputs(tensors)
    out, updates = found.runner("extend", inputs).step(buffers, inputs, masks)
    out = cast(out, output_dtype(inputs, is_wide=found.is_wide))
    results = unaliased([out], [*past, *tensors, *frame])
    for name, old in buffers.items():
        new = updated(old, updates[name], length, count, donate=False)
        results.append(torch.empty_like(old).copy_(new))
    return results


# ------------------------------------------------------------------------- shapes, for tracing


def _output_like(
    piece: str, backend: str, tensors: Tensors, *, is_step: bool = False, has_gradient: bool = False
) -> Tensor:
    found = named(piece, backend)
    inputs, declared, output = found.inputs(tensors), found.piece.inputs, found.piece.program.output
    if is_step:
        declared, output = declared.extending(), output.renamed({"s": "t"})
    shape = output.shape(declared.sizes(str(found.piece), shapes_of(inputs)))
    dtype = output_dtype(inputs, is_wide=found.is_wide, has_gradient=has_gradient)
    return tensors[0].new_empty(shape, dtype=dtype)


def _like(tensors: Tensors) -> Tensors:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]


@forward.register_fake
def _(piece: str, backend: str, tensors: Tensors, frame: Masks, layout: str = "") -> Tensors:
    found, masks = named(piece, backend), frame_of(layout, frame, tensors[0])
    inputs = found.inputs(tensors)
    specs = {name: ArraySpec.of(t) for name, t in inputs.items()}
    residuals = [
        tensors[0].new_empty(spec.shape, dtype=getattr(torch, spec.dtype))
        for spec in found.runner("vjp", inputs).residual_shapes(specs, masks)
    ]
    return [_output_like(piece, backend, tensors, has_gradient=True), *residuals]


@step.register_fake
def _(piece: str, backend: str, past: Tensors, tensors: Tensors, *_: Tree) -> Tensors:
    return [_output_like(piece, backend, tensors, is_step=True, has_gradient=True), *_like(past)]


@extension.register_fake
def _(piece: str, backend: str, past: Tensors, tensors: Tensors, *_: Tree) -> Tensors:
    return [_output_like(piece, backend, tensors, is_step=True), *map(torch.empty_like, past)]


inference.register_fake(lambda piece, backend, tensors, *_: _output_like(piece, backend, tensors))
backward.register_fake(lambda piece, backend, tensors, *_: _like(tensors))
step_backward.register_fake(lambda piece, backend, past, tensors, *_: _like([*past, *tensors]))
