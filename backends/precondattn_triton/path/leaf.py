"""PaTH as a leaf of the backend: supported calls, and their launches.

Residuals: λ (b, h, t), and, if the output is rounded to half precision, the output in float32
(b, t, h, e). Chunks (`chunks.py`) are recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from precondattn.backend import ArraySpec, Request
from precondattn.cache import Updates
from precondattn.frame import Frame
from precondattn.kernel_backend.attention_options import declined_option, logs_and_unrounded
from precondattn.spec.laser import LOG_MEAN_EXP
from precondattn.spec.path import Path
from precondattn_triton.path.backward import PathInputs, path_backward
from precondattn_triton.path.blocks import path_blocks
from precondattn_triton.path.chunk_gradient import tokens_of
from precondattn_triton.path.chunks import path_chunks
from precondattn_triton.path.extension import path_extend, refuses_extension
from precondattn_triton.path.forward import path_forward
from precondattn_triton.path.step import path_step, refuses_step
from precondattn_triton.softmax.channel_parts import refuses_widths
from precondattn_triton.tiles import masks_of

Tensors = Mapping[str, torch.Tensor]


class PathKernels:
    """Kernels of the leaf `Path` whose output is the weighted mean of the values."""

    def refuses(self, leaf: Path, request: Request) -> str | None:
        """The reason why the kernels do not support this call, or None."""
        if leaf.read == LOG_MEAN_EXP:
            return "has kernels for PaTH with the mean as its read only, not for LASER around it"
        reason = declined_option(leaf, "PaTH")
        if reason is not None:
            return reason
        shapes = dict(request.shapes)
        if 0 in shapes["q"] + shapes["k"] + shapes["v"]:
            return "its kernels for PaTH support no empty arrays"
        if request.verb == "extend":
            if shapes["q"][1] == 1:
                return refuses_step(shapes)
            return refuses_extension(request.dtype, shapes)
        if shapes["q"][1] > shapes["k"][1]:
            return "its kernels for PaTH do not support more queries than keys"
        return refuses_widths("PaTH", request.dtype, shapes["k"][3], shapes["v"][3])

    def forward(
        self, leaf: Path, x: Tensors, frame: Frame
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The output (b, t, h, e) in the dtype of the values, and the residuals."""
        q, k, v, w, beta = _inputs(x)
        masks = masks_of(frame, q.shape[0])
        chunks = path_chunks(k, w, beta, masks, with_inverse=False)
        blocks = path_blocks(chunks, k.shape[1], v, with_after=False)
        scale = leaf.scale_for(q.shape[3])
        results = path_forward(q, k, v, chunks, blocks, masks, scale=scale, window=leaf.window)
        residuals = (results.log_total,)
        return results.out, residuals if results.full is results.out else (*residuals, results.full)

    def backward(
        self,
        leaf: Path,
        x: Tensors,
        frame: Frame,
        out: torch.Tensor,
        residuals: tuple[torch.Tensor, ...],
        cotangent: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """The gradients of all inputs, in their dtypes."""
        inputs = _inputs(x)
        q, k, v, w, beta = inputs
        masks = masks_of(frame, q.shape[0])
        chunks = path_chunks(k, w, beta, masks, with_inverse=True)
        log_total, *full = residuals
        d = path_backward(
            inputs,
            chunks,
            path_blocks(chunks, k.shape[1], v, with_after=True),
            masks,
            full[0] if full else out.contiguous(),
            log_total,
            cotangent.to(q.dtype),
            scale=leaf.scale_for(q.shape[3]),
            window=leaf.window,
        )
        gradients = {"q": d.q.to(x["q"].dtype)}
        for name in ("k", "v", "w", "beta"):
            gradients[name] = tokens_of(getattr(d, name), x[name])
        return gradients

    def step(
        self,
        leaf: Path,
        past: Tensors,
        x: Tensors,
        frame: Frame,
    ) -> tuple[torch.Tensor, Updates]:
        """The output for new tokens, and the updates of the cache's buffers."""
        keys = leaf.program.slot_keys[0]
        extend = path_step if x["q"].shape[1] == 1 else path_extend
        out, updates = extend(leaf, {slot: past[key] for slot, key in keys.items()}, x, frame)
        return out, {keys[slot]: update for slot, update in updates.items()}

    def residual_shapes(self, leaf: Path, inputs: Mapping[str, ArraySpec]) -> tuple[ArraySpec, ...]:
        return logs_and_unrounded(inputs)


def _inputs(x: Tensors) -> PathInputs:
    """The inputs in the dtype of v, except β."""
    dtype = x["v"].dtype
    q, k, v, w = (x[name].to(dtype) for name in ("q", "k", "v", "w"))
    return PathInputs(q, k, v, w, x["beta"])
