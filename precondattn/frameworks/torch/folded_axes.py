"""PyTorch: the array axes into which the mapped axis of `torch.vmap` is folded.

Sequences are independent, and so are key/value heads with their query heads. So the mapped calls
become one call with more sequences, or with more heads. Every array that differs between the calls
needs the axis. The folded axis of residuals is the one that is longer in the one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from precondattn.algebra.declaration import HEADS, Pattern, Sizes
from precondattn.algebra.piece import Piece
from precondattn.arrays import Tree, dtype_name
from precondattn.backend import ArraySpec
from precondattn.frame import OF_TOKENS
from precondattn.frameworks.torch.frames import frame_of
from precondattn.frameworks.torch.operators import named

BATCH = "b"
KINDS = (BATCH, HEADS)
"""The letters of the axes to fold into, in order of preference."""
POSITIONS = 2
"""The number of arrays at the start of a frame whose row all sequences may share."""

AxesOf = list[int | None]
"""An axis for each array; None for an array without the axis."""
Shapes = list[tuple[int, ...]]


class SeparateCallsError(Exception):
    """The mapped calls can not be one call along these axes."""


class MappedArrays(NamedTuple):
    """A list of arrays among the arguments of a mapped operator."""

    tensors: Sequence[Tensor | None]
    mapped: Sequence[int | None]
    """The mapped axis of each array; None if all calls have the same array."""

    @property
    def shapes(self) -> Shapes:
        """The shapes of the arrays in one mapped call."""
        return [
            () if t is None else tuple(n for i, n in enumerate(t.shape) if i != axis)
            for t, axis in zip(self.tensors, self.mapped, strict=True)
        ]

    def folded(self, axes: AxesOf, count: int) -> list[Tree]:
        """The arrays of the one call; arrays without the axis are not changed."""
        return [
            t if t is None or at is None else _folded(t, mapped, at, count)
            for t, mapped, at in zip(self.tensors, self.mapped, axes, strict=True)
        ]

    def of_call(self, number: int) -> list[Tree]:
        """The arrays of one mapped call; zeros for call 0 if there are no calls."""
        arrays = []
        for tensor, axis, shape in zip(self.tensors, self.mapped, self.shapes, strict=True):
            if tensor is not None and axis is not None:
                is_there = tensor.shape[axis] > 0
                tensor = tensor.select(axis, number) if is_there else tensor.new_zeros(shape)
            arrays.append(tensor)
        return arrays


def _folded(tensor: Tensor, mapped: int | None, at: int, count: int) -> Tensor:
    if mapped is not None:
        stacked = tensor.movedim(mapped, at)
    else:
        stacked = tensor.unsqueeze(at).expand(*tensor.shape[:at], count, *tensor.shape[at:])
    before, after = stacked.shape[:at], stacked.shape[at + 2 :]
    return stacked.reshape(*before, count * stacked.shape[at + 1], *after)


@dataclass
class OneCall:
    """One call that replaces `count` mapped calls of a piece, along axes of one kind.

    If that is impossible, the constructor or a method raises a `SeparateCallsError`.
    """

    piece: Piece
    sizes: Sizes
    kind: str
    count: int
    backend: str
    tensors: MappedArrays
    frame: MappedArrays
    layout: str

    def __post_init__(self) -> None:
        if self.piece.mixes_sequences or (self.kind == HEADS and self.piece.numbers_heads):
            raise SeparateCallsError

    def axes_of(
        self, patterns: Iterable[Pattern], arrays: MappedArrays, *, each: bool = False
    ) -> AxesOf:
        """The axes of arrays; `each` is for arrays that differ in every call, such as gradients."""
        axes = [self._axis(p, s) for p, s in zip(patterns, arrays.shapes, strict=True)]
        for axis, mapped in zip(axes, arrays.mapped, strict=True):
            if axis is None and (each or mapped is not None):
                raise SeparateCallsError
        return axes

    def of_inputs(self, *, each: bool = False) -> AxesOf:
        return self.axes_of(self.piece.inputs.values(), self.tensors, each=each)

    def of_buffers(self, past: MappedArrays) -> AxesOf:
        patterns = [pattern for _, pattern in self.piece.program.slots.values()]
        return self.axes_of(patterns, past, each=True)

    def of_output(self) -> int:
        axis = self._axis(self.piece.program.output)
        if axis is None:
            raise SeparateCallsError
        return axis

    def of_frame(self) -> AxesOf:
        """The axes of a frame's arrays: the first axis, or None if sequences share it."""
        if len(self.frame.shapes) > OF_TOKENS:  # Masks of pairs may broadcast along the axis.
            raise SeparateCallsError
        axes: AxesOf = []
        for i, (shape, mapped) in enumerate(zip(self.frame.shapes, self.frame.mapped, strict=True)):
            is_shared = self.kind != BATCH or (i < POSITIONS and shape[:1] == (1,))
            if is_shared and mapped is not None:
                raise SeparateCallsError
            axes.append(None if is_shared else 0)
        return axes

    def of_residuals(self, shapes: Shapes | None = None) -> AxesOf:
        """The axes of residuals, given their shapes in one mapped call; by default the declared."""
        before = self._declared(self.tensors.shapes) if shapes is None else shapes
        if not before:
            return []
        longer = [
            tuple(n * self.count if i == axis else n for i, n in enumerate(shape))
            for shape, axis in zip(self.tensors.shapes, self.of_inputs(), strict=True)
        ]
        return [self._grown(*pair) for pair in zip(before, self._declared(longer), strict=True)]

    def _axis(self, pattern: Pattern, shape: Sequence[int] | None = None) -> int | None:
        """The axis of an array; None if it has none, or one of size 1 that broadcasts."""
        axes = [i for i, axis in enumerate(pattern.axes) if axis.letter in self.kind]
        if not axes:
            return None
        at = axes[0]
        if len(axes) > 1 or pattern.axes[at].multiple > 1:
            raise SeparateCallsError
        return at if shape is None or shape[at] == pattern.axes[at].size(self.sizes) else None

    def _declared(self, shapes: Shapes) -> Shapes:
        tensors = self.tensors.tensors
        described = zip(self.piece.inputs, shapes, tensors, strict=True)
        specs = {name: ArraySpec(shape, dtype_name(t)) for name, shape, t in described}
        inputs = dict(zip(self.piece.inputs, self.tensors.of_call(0), strict=True))
        runner = named(self.piece._name, self.backend).runner("vjp", inputs)
        frame = frame_of(self.layout, self.frame.of_call(0), tensors[0])
        try:
            residuals = runner.residual_shapes(specs, frame)
        except NotImplementedError:  # Backends need `residual_shapes` only for compilers.
            raise SeparateCallsError from None
        return [tuple(spec.shape) for spec in residuals]

    def _grown(self, before: Sequence[int], after: Sequence[int]) -> int | None:
        """The axis that grew; an error unless it is one axis, of sequences or heads only."""
        lengths = [self.sizes[letter] for letter in self.kind if letter in self.sizes]
        grown = [i for i, (n, m) in enumerate(zip(before, after, strict=True)) if n != m]
        if not grown:
            return None
        at = grown[0]
        if len(grown) > 1 or before[at] not in lengths or after[at] != self.count * before[at]:
            raise SeparateCallsError
        return at
