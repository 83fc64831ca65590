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
from precondattn.kernel_backend.attention_options import declined_option
from precondattn.spec.metric import DOT
from precondattn.spec.softmax import Softmax
from precondattn_triton.softmax.laser_backward import laser_backward
from precondattn_triton.softmax.laser_call import SUPPORTED, LaserCall
from precondattn_triton.softmax.laser_decode import laser_step, refuses_laser_step
from precondattn_triton.softmax.laser_forward import laser_forward
from precondattn_triton.softmax.laser_values import ValueSpread, spread
from precondattn_triton.softmax.score_options import options_of
from precondattn_triton.softmax.widths import WIDEST_IN_PARTS
from precondattn_triton.tiles import masks_of

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
        call = _call(leaf, x, frame)
        value_range = spread(call.v, call.masks)
        read = laser_forward(call, value_range)
        residuals = read.log_total, *value_range
        return read.out, residuals if read.full is read.out else (*residuals, read.full)

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
        call = _call(leaf, x, frame)
        log_total, shift, less, is_close, *full = residuals
        gradients = laser_backward(
            call,
            x.get("bias"),
            ValueSpread(shift, less, is_close),
            full[0] if full else out.contiguous(),
            log_total,
            cotangent.to(call.v.dtype),
        )
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
        """The shapes of the residuals of `forward`."""
        b, t, h, _ = inputs["q"].shape
        (_, _, n, e), dtype = inputs["v"]
        always = (
            ArraySpec((b, h, t), "float32"),
            ArraySpec((b, n, e), "float32"),
            ArraySpec((b, n, e), "float32"),
            ArraySpec((b, n), "int32"),
        )
        return always if dtype == "float32" else (*always, ArraySpec((b, t, h, e), "float32"))


def _call(leaf: Softmax, x: Tensors, frame: Frame) -> LaserCall:
    """A call as its kernels read it, in the dtype of the values."""
    v = x["v"]
    q, k = x["q"].to(v.dtype), x["k"].to(v.dtype)
    b, _, h, d = q.shape
    masks, options = masks_of(frame, b), options_of(leaf, x, b, h)
    return LaserCall(q, k, v, masks, options, leaf.scale_for(d), leaf.causal)
