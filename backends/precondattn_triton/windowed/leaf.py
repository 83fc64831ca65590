"""The leaf `Windowed`: supported calls, and their launches.

Residuals: λ (b, h, t), and, if the output is rounded to half precision, the output in float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from precondattn.backend import ArraySpec, Request
from precondattn.frame import Frame
from precondattn.kernel_backend.windows import declined_windows, grid_of
from precondattn.spec.windowed import Windowed
from precondattn_triton.softmax.score_tiles import row_products
from precondattn_triton.softmax.widths import refuses_widths
from precondattn_triton.tiles import masks_of
from precondattn_triton.windowed.forward import WindowedArrays, window_forward
from precondattn_triton.windowed.gradient import window_gradient

Tensors = Mapping[str, torch.Tensor]


class WindowedKernels:
    """Softmax within windows, and its gradient."""

    def refuses(self, leaf: Windowed, request: Request) -> str | None:
        """The reason why the kernels do not support this call, or None."""
        reason = declined_windows(leaf, request)
        if reason is not None:
            return reason
        shapes = dict(request.shapes)
        return refuses_widths("windows", request.dtype, shapes["k"][3], shapes["v"][3])

    def forward(
        self, leaf: Windowed, x: Tensors, frame: Frame
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The output (b, t, h, e) in the dtype of the values, and the residuals."""
        out, full, logs = window_forward(_problem(leaf, x, frame))
        return out, (logs,) if full is out else (logs, full)

    def backward(
        self,
        leaf: Windowed,
        x: Tensors,
        frame: Frame,
        out: torch.Tensor,
        residuals: tuple[torch.Tensor, ...],
        cotangent: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """The gradients of all inputs, in their dtypes."""
        problem = _problem(leaf, x, frame)
        logs, *full = residuals
        d_out = cotangent.to(problem.v.dtype)
        d_sums = row_products(
            d_out, full[0] if full else out.contiguous(), logs, problem.masks.q_valid
        )
        gradients = window_gradient(problem, logs, d_sums, d_out)
        return {name: gradient.to(x[name].dtype) for name, gradient in gradients.items()}

    def residual_shapes(
        self, leaf: Windowed, inputs: Mapping[str, ArraySpec]
    ) -> tuple[ArraySpec, ...]:
        """The shapes of the residuals of `forward`."""
        b, t, h, _ = inputs["q"].shape
        (_, _, _, e), dtype = inputs["v"]
        logs = ArraySpec((b, h, t), "float32")
        return (logs,) if dtype == "float32" else (logs, ArraySpec((b, t, h, e), "float32"))


def _problem(leaf: Windowed, x: Tensors, frame: Frame) -> WindowedArrays:
    """A call as its kernels read it, in the dtype of the values."""
    v = x["v"]
    q, k = (x[name].to(v.dtype) for name in ("q", "k"))
    grid, size = grid_of(leaf.windows, k.shape[1])
    masks = masks_of(frame, q.shape[0])
    return WindowedArrays(
        q, k, v, x.get("bias_table"), masks, leaf.scale_for(q.shape[3]), grid, size
    )
