"""The PyTorch backend: which leaves are computed by which algorithm.

They are those of `precondattn_portable`, on PyTorch's products; and PyTorch's own attention where
it fits, which is left to PyTorch's autograd.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import precondattn as pa
from precondattn.arrays import Array
from precondattn.backend import Request, Support
from precondattn.cache import Updates
from precondattn.frame import Frame
from precondattn.spec.read import MEAN
from precondattn_portable.algorithm import Algorithm, Arrays, Residuals
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.backend import Portable


class Torch(Portable):
    """Blocked algorithms and scaled-dot-product attention, on any device."""

    name = "torch"
    libraries = frozenset({"torch"})
    preference = 10

    def arithmetic(self, like: Array) -> Arithmetic:
        from precondattn_torch.arithmetic import TORCH

        return TORCH

    def supports(self, mechanism: Any, request: Request) -> Support:
        support = super().supports(mechanism, request)
        if not support.ok:
            return support
        return Support.yes(differentiable=self._is_differentiable(mechanism, request))

    def algorithm(self, leaf: Any) -> Algorithm | None:
        if type(leaf) is pa.Softmax:
            from precondattn_torch.scaled_dot_product import KernelAttention

            return KernelAttention()
        return super().algorithm(leaf)

    def _is_differentiable(self, leaf: Any, request: Request) -> bool:
        """Whether it is made of PyTorch's own differentiable calls."""
        if isinstance(leaf, pa.TokenWise):
            return True
        if type(leaf) is not pa.Softmax or leaf.read != MEAN or request.verb.startswith("extend"):
            return False
        from precondattn_torch.scaled_dot_product import fits

        return fits(leaf, dict(request.shapes), request.masks, request.device)

    def forward(
        self, mechanism: Any, inputs: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        with self._recording(mechanism, inputs, frame):
            return super().forward(mechanism, inputs, frame)

    def backward(
        self,
        mechanism: Any,
        inputs: Mapping[str, Array],
        frame: Frame,
        out: Array,
        residuals: Residuals,
        cotangent: Array,
    ) -> Arrays:
        with _not_recording():
            return super().backward(mechanism, inputs, frame, out, residuals, cotangent)

    def step(
        self,
        mechanism: Any,
        past: Mapping[str, Array],
        inputs: Mapping[str, Array],
        frame: Frame,
    ) -> tuple[Array, Updates]:
        if isinstance(mechanism, pa.TokenWise):
            return super().step(mechanism, past, inputs, frame)
        with _not_recording():
            return super().step(mechanism, past, inputs, frame)

    def step_backward(
        self,
        mechanism: Any,
        past: Mapping[str, Array],
        inputs: Mapping[str, Array],
        frame: Frame,
        cotangent: Array,
        d_buffers: Mapping[str, Array],
    ) -> tuple[Arrays, Arrays]:
        with _not_recording():
            return super().step_backward(mechanism, past, inputs, frame, cotangent, d_buffers)

    def _recording(
        self, leaf: Any, inputs: Mapping[str, Array], frame: Frame
    ) -> AbstractContextManager[Any]:
        """Autograd looks on only where the work is left to it."""
        if isinstance(leaf, pa.TokenWise):
            return nullcontext()
        if type(leaf) is pa.Softmax and leaf.read == MEAN:
            from precondattn_torch.scaled_dot_product import fits, masks_of

            shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
            if fits(leaf, shapes, masks_of(frame), inputs["q"].device.type):
                return nullcontext()
        return _not_recording()


def _not_recording() -> AbstractContextManager[Any]:
    import torch

    return torch.no_grad()
