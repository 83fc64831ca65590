"""LASER as a leaf of the backend: supported calls, and their launches.

Residuals: λ (b, h, t), the range of the values (`laser_values.ValueSpread`), and, if the output is
rounded to half precision, the output in float32 (b, t, h, e).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from precondattn.backend import ArraySpec, Request
from precondattn.cache import Updates
from precondattn.frame import Frame
from precondattn.kernel_backend.attention_options import declined_option, logs_and_unrounded
from precondattn.spec.metric import DOT
from precondattn.spec.softmax import Softmax
from precondattn_triton.softmax.channel_parts import WIDEST_IN_PARTS
from precondattn_triton.softmax.laser_decode import SUPPORTED, laser_step, refuses_laser_step
from precondattn_triton.softmax.laser_exact import exact_backward, exact_forward
from precondattn_triton.softmax.laser_values import ValueSpread, cotangents, spread, weights
from precondattn_triton.softmax.softmax_backward import attention_backward
from precondattn_triton.softmax.softmax_forward import (
    AttentionCall,
    attention_call,
    attention_forward,
)

STEP = 4
"""Widths must be multiples of it, so that rows of 16-bit numbers begin at multiples of 8 bytes."""

Tensors = Mapping[str, torch.Tensor]


class LaserKernels:
    """Kernels of the leaf `Softmax` whose output is a log-mean-exp of the values."""

    def refuses(self, leaf: Softmax, request: Request) -> str | None:
        """The reason why the kernels do not support this call, or None."""
        shapes = dict(request.shapes)
        if request.verb == "extend":
            return refuses_laser_step(leaf, request)
        if request.verb not in ("forward", "vjp"):
            return "has no kernel for LASER that extends a cache"
        if request.dtype == "float64":
            return "has kernels for LASER in float16, bfloat16 and float32, not in float64"
        if leaf.metric != DOT:
            return f"has kernels for LASER with scores <q, k> only, not of {leaf.name}"
        reason = declined_option(leaf, "LASER", SUPPORTED)
        if reason is not None:
            return reason
        for name, width in (("keys", shapes["k"][3]), ("values", shapes["v"][3])):
            if width > WIDEST_IN_PARTS or width % STEP:
                return (
                    f"has kernels for LASER with {name} whose width is a multiple of {STEP} and at "
                    f"most {WIDEST_IN_PARTS}; found {width}"
                )
        return None

    def forward(
        self, leaf: Softmax, x: Tensors, frame: Frame
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The output (b, t, h, e) in the dtype of the values, and the residuals."""
        call = attention_call(leaf, x, frame)
        value_range = spread(call.v, call.masks)
        results = attention_forward(_of_close_heads(call, value_range))
        exact_forward(call, value_range.is_close, results)
        residuals = results.logs, *value_range
        return results.out, (
            residuals if results.full is results.out else (*residuals, results.full)
        )

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
        logs, shift, less, is_close, *float_outs = residuals
        full = float_outs[0] if float_outs else out.contiguous()
        value_range, d_out = ValueSpread(shift, less, is_close), cotangent.to(call.v.dtype)
        g, d_sums = cotangents(d_out, call.masks, value_range, full, logs)
        of_close = _of_close_heads(call, value_range)
        gradients = attention_backward(of_close, x.get("bias"), logs, d_sums, g)
        exact_backward(call, is_close, full, logs, d_out, gradients)
        return {name: gradient.to(x[name].dtype) for name, gradient in gradients.items()}

    def step(
        self, leaf: Softmax, past: Tensors, x: Tensors, frame: Frame
    ) -> tuple[torch.Tensor, Updates]:
        """The output for a few new tokens, and the updates of the cache's buffers."""
        keys = leaf.program.slot_keys[0]
        out, updates = laser_step(leaf, {slot: past[key] for slot, key in keys.items()}, x, frame)
        return out, {keys[slot]: update for slot, update in updates.items()}

    def residual_shapes(
        self, leaf: Softmax, inputs: Mapping[str, ArraySpec]
    ) -> tuple[ArraySpec, ...]:
        b, n, e = inputs["v"].shape[0], *inputs["v"].shape[2:]
        logs, *unrounded = logs_and_unrounded(inputs)
        of_channels = ArraySpec((b, n, e), "float32")
        return logs, of_channels, of_channels, ArraySpec((b, n), "int32"), *unrounded


def _of_close_heads(call: AttentionCall, value_range: ValueSpread) -> AttentionCall:
    """The call of softmax attention to W."""
    w = weights(call.v, call.masks, value_range)
    return call._replace(v=w.transpose(1, 2), value_range=value_range)
