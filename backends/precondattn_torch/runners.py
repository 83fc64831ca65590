"""Runners of leaves on PyTorch, and which of their operations autograd records.

Autograd records nothing of a blocked algorithm, whose gradient is `backward`. It records algorithms
that consist of PyTorch's own differentiable operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor

import precondattn as pa
from precondattn.arrays import HALF, Residuals
from precondattn.backend import Request
from precondattn.frame import Frame
from precondattn_portable.backend import AlgorithmRunner
from precondattn_portable.layout import zero_padding
from precondattn_torch.scaled_dot_product import (
    attend,
    fits_call,
    needs_sums,
    of_one_dtype,
    options_of,
    scaled_dot_product,
)

P = ParamSpec("P")
R = TypeVar("R")


def unrecorded(method: Callable[P, R]) -> Callable[P, R]:
    """A method whose operations autograd does not record."""

    @wraps(method)
    def hidden(*arguments: P.args, **named: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return method(*arguments, **named)
        with torch.no_grad():
            return method(*arguments, **named)

    return hidden


class UnrecordedRunner(AlgorithmRunner):
    """Runs an algorithm without recording for autograd."""

    forward = unrecorded(AlgorithmRunner.forward)
    forward_with_residuals = forward
    backward = unrecorded(AlgorithmRunner.backward)
    step = unrecorded(AlgorithmRunner.step)
    step_backward = unrecorded(AlgorithmRunner.step_backward)


class RecordedRunner(UnrecordedRunner):
    """Runs a leaf without sums over tokens, by its definition."""

    forward = AlgorithmRunner.forward
    step = AlgorithmRunner.step


class AttentionRunner(UnrecordedRunner):
    """Runs `Softmax`: by PyTorch's attention where it fits."""

    def forward(self, inputs: Mapping[str, Tensor], frame: Frame) -> tuple[Tensor, Residuals]:
        leaf = cast("pa.Softmax", self.piece)
        if needs_sums(leaf) or not fits_call(leaf, inputs, frame):
            hidden: tuple[Tensor, Residuals] = self.forward_with_residuals(inputs, frame)
            return hidden
        q, k, v = of_one_dtype(inputs["q"], inputs["k"], inputs["v"])
        return zero_padding(scaled_dot_product(leaf, q, k, v), frame), ()


class FusedRunner(AttentionRunner):
    """Runs calls of `Softmax` of one signature, which PyTorch's attention supports."""

    def __init__(self, runner: AttentionRunner, request: Request) -> None:
        name = "scaled_dot_product_attention"
        super().__init__(runner.piece, runner.methods, algorithm=name, differentiable=True)
        leaf, shapes = cast("pa.Softmax", runner.piece), dict(request.shapes)
        self.width = max(shapes["q"][3], shapes["v"][3])
        self.options = options_of(leaf, shapes["q"], shapes["k"])
        self.is_plain = request.device == "cpu" and request.dtype not in HALF
        self.has_padding = bool(request.masks)

    def forward(self, inputs: Mapping[str, Tensor], frame: Frame) -> tuple[Tensor, Residuals]:
        q, k, v = inputs["q"], inputs["k"], inputs["v"]
        if not self.is_plain:
            q, k, v = of_one_dtype(q, k, v)
        out = attend(q, k, v, self.width, self.options)
        return zero_padding(out, frame) if self.has_padding else out, ()
