"""Softmax attention with options as a leaf of the backend: supported calls, and their launches.

Plain softmax attention is left to PyTorch's own kernel. These kernels compute it with a window, a
bias, a soft cap, a sink or slopes of distances, which that kernel does not support.

Residuals: λ (b, h, t), and, if the output is rounded to half precision, the output in float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from precondattn.backend import ArraySpec, Request
from precondattn.frame import Frame
from precondattn.kernel_backend.attention_options import (
    BIAS,
    SINK,
    SLOPES,
    SOFTCAP,
    declined_option,
    logs_and_unrounded,
)
from precondattn.spec.metric import DOT
from precondattn.spec.softmax import Softmax
from precondattn_triton.softmax.channel_parts import WIDEST_VALUE, refuses_widths
from precondattn_triton.softmax.score_tiles import row_products
from precondattn_triton.softmax.softmax_backward import attention_backward
from precondattn_triton.softmax.softmax_forward import attention_call, attention_forward

Tensors = Mapping[str, torch.Tensor]

SUPPORTED = BIAS, SOFTCAP, SINK, SLOPES
"""The options of these kernels, besides a window."""


class SoftmaxKernels:
    """Kernels of the leaf `Softmax` with an option, whose output is the weighted mean."""

    def refuses(self, leaf: Softmax, request: Request) -> str | None:
        """The reason why the kernels do not support this call, or None."""
        if leaf.metric != DOT:
            return f"has kernels for softmax with scores <q, k> only, not of {leaf.name}"
        reason = declined_option(leaf, "softmax", SUPPORTED)
        if reason is not None:
            return reason
        if leaf.window is None and declined_option(leaf, "softmax") is None:
            return f"has no kernels for {leaf} without options, which PyTorch's own kernel computes"
        if request.verb not in ("forward", "vjp"):
            return "has no step of softmax that extends a cache"
        shapes = dict(request.shapes)
        if 0 in shapes["q"] + shapes["k"] + shapes["v"]:
            return "its kernels for softmax support no empty arrays"
        key, value, widest = shapes["k"][3], shapes["v"][3], WIDEST_VALUE["float32"]
        # The factors of gradients have 32 bits in float16.
        if request.dtype == "float16" and value > widest:
            return (
                f"has kernels for softmax in float16 with values of width {widest} at most; "
                f"found {value}"
            )
        return refuses_widths("softmax", request.dtype, key, value)

    def forward(
        self, leaf: Softmax, x: Tensors, frame: Frame
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The output (b, t, h, e) in the dtype of the values, and the residuals."""
        results = attention_forward(attention_call(leaf, x, frame))
        logs, full = results.logs, results.full
        return results.out, (logs,) if full is results.out else (logs, full)

    def backward(
        self,
        leaf: Softmax,
        x: Tensors,
        frame: Frame,
        out: torch.Tensor,
        residuals: tuple[torch.Tensor, ...],
        cotangent: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """The gradients of all inputs, in their dtypes."""
        call = attention_call(leaf, x, frame)
        logs, *full = residuals
        d_out = cotangent.to(call.v.dtype)
        d_sums = row_products(
            d_out, full[0] if full else out.contiguous(), logs, call.masks.q_valid
        )
        gradients = attention_backward(call, x.get("bias"), logs, d_sums, d_out)
        return {name: gradient.to(x[name].dtype) for name, gradient in gradients.items()}

    def residual_shapes(
        self, leaf: Softmax, inputs: Mapping[str, ArraySpec]
    ) -> tuple[ArraySpec, ...]:
        return logs_and_unrounded(inputs)
