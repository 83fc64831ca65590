"""Calls with empty arrays: no sequences, no queries or no keys. They need no backend.

    b = 0 or t = 0:   the output is empty
    t > 0 and s = 0:  every query sees no key, and has output 0 and log-sum-exp −∞ or the sink

Gradients are 0. An extension by no tokens does not change a buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from precondattn.arrays import Array, ByName, Shape, fresh, namespace, placement
from precondattn.backend import Backend, Request, Runner
from precondattn.cache import Replace, Updates
from precondattn.frame import Frame
from precondattn.frameworks import of
from precondattn.spec.read import MEAN_AND_LOG_SUM

if TYPE_CHECKING:
    from precondattn.algebra.piece import Piece
    from precondattn.arrays import Arrays, Residuals


def is_empty(shapes: Iterable[Shape]) -> bool:
    """Whether one of the inputs is empty."""
    return any([0 in shape for shape in shapes])  # noqa: C419  Sooner than a generator.


class EmptyRunner(Runner):
    """The runner of a piece on empty arrays."""

    differentiable = True

    def __init__(self, piece: Piece) -> None:
        self.piece = piece

    def forward(self, inputs: ByName, frame: Frame) -> tuple[Array, Residuals]:
        sizes = self.piece.inputs.sizes(str(self.piece), _shapes(inputs))
        out = _zeros(self.piece.program.output.shape(sizes), inputs)
        if _returns_log_sum(self.piece) and sizes["s"] == 0:
            xp, last = namespace(out), out[..., -1:] - math.inf
            if "sink" in inputs:
                sink = xp.astype(inputs["sink"], out.dtype)
                last = xp.zeros_like(last) + sink[None, None, :, None]
            out = xp.concat([out[..., :-1], last], axis=-1)
        return out, ()

    def backward(
        self, inputs: ByName, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        gradients = _zeros_like(inputs)
        if _returns_log_sum(self.piece) and "sink" in inputs:
            d_sink = namespace(cotangent).sum(cotangent[..., -1], axis=(0, 1))
            gradients["sink"] = gradients["sink"] + d_sink
        return gradients

    def step(self, past: ByName, inputs: ByName, frame: Frame) -> tuple[Array, Updates]:
        sizes = self.piece.inputs.extending().sizes(str(self.piece), _shapes(inputs))
        out = _zeros(self.piece.program.output.renamed({"s": "t"}).shape(sizes), inputs)
        return out, {
            name: Replace(buffer if frame.may_overwrite else fresh(buffer))
            for name, buffer in past.items()
        }

    def step_backward(
        self, past: ByName, inputs: ByName, frame: Frame, cotangent: Array, d_buffers: ByName
    ) -> tuple[Arrays, Arrays]:
        return _zeros_like(inputs), {name: fresh(d) for name, d in d_buffers.items()}


class Empty(Backend):
    """The backend that runs any mechanism on empty arrays of any library."""

    name = "none (the arrays are empty)"
    masks_pairs = True

    def prepare(self, piece: Piece, request: Request) -> Runner:
        return EmptyRunner(piece)


EMPTY = Empty()
"""The backend of every call with empty arrays. Users can not choose it."""


def _returns_log_sum(mechanism: Piece) -> bool:
    return getattr(mechanism.program.leaves[-1], "read", None) == MEAN_AND_LOG_SUM


def _shapes(inputs: ByName) -> dict[str, Shape]:
    return {name: tuple(array.shape) for name, array in inputs.items()}


def _zeros(shape: Shape, inputs: ByName) -> Array:
    """Zeros that depend on all inputs, so that PyTorch's autograd gives gradients of 0."""
    like = inputs["v"] if "v" in inputs else next(iter(inputs.values()))
    zeros = namespace(like).zeros(shape, dtype=like.dtype, **placement(like))
    return of(like).depending_on(zeros, inputs.values())


def _zeros_like(arrays: ByName) -> Arrays:
    return {name: namespace(array).zeros_like(array) for name, array in arrays.items()}
