"""LUCID's solve as a leaf of the backend: supported calls, and their launches (`matrix.py`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from precondattn.backend import ArraySpec, Request
from precondattn.cache import Updates
from precondattn.frame import Frame
from precondattn.kernel_backend.limits import MOST_HEADS
from precondattn.spec.lucid import LucidSolve
from precondattn.spec.metric import DOT
from precondattn_triton.lucid import extension, transported_extension
from precondattn_triton.lucid.matrix import LucidMatrix
from precondattn_triton.path.blocks import WIDEST

FEWEST_NEW_TOKENS = 16
"""New tokens from which on a step copies the cache to its workspace; fewer read the cache once."""


class LucidSolveKernels:
    """The leaf `LucidSolve`."""

    def refuses(self, leaf: LucidSolve, request: Request) -> str | None:
        if not leaf.has_unit_diagonal:
            return f"its solve has a unit diagonal, unlike normalize={leaf.normalize!r}"
        if leaf.window is not None:
            return "its solve has no window"
        shapes = dict(request.shapes)
        d, e = shapes["k"][3], shapes["v"][3]
        if d > 256 or e > 512:
            return f"its solve supports d <= 256 and e <= 512; found d={d}, e={e}"
        if 0 in shapes["v"]:
            return "its solve supports no empty arrays"
        if shapes["k"][0] * shapes["k"][2] > MOST_HEADS:
            return f"its solve supports at most {MOST_HEADS} heads of all sequences together"
        return self._refuses_extension(leaf, request) if request.verb == "extend" else None

    def _refuses_extension(self, leaf: LucidSolve, request: Request) -> str | None:
        _, t, _, d = dict(request.shapes)["k"]
        if "segment_ids" in request.masks:
            return "its step of the solve supports no packed sequences"
        if leaf.metric != DOT and d > WIDEST:
            return f"its step of the solve in PaTH's metric supports d <= {WIDEST}; found d={d}"
        if leaf.metric == DOT and t < FEWEST_NEW_TOKENS:
            return f"its step of the solve supports {FEWEST_NEW_TOKENS} or more tokens; found t={t}"
        return None

    def step(
        self, leaf: LucidSolve, past: Mapping[str, Tensor], x: Mapping[str, Tensor], frame: Frame
    ) -> tuple[Tensor, Updates]:
        """y of new tokens (b, t, n, e), and the updates of the cache's buffers."""
        extend = extension.extend if leaf.metric == DOT else transported_extension.extend
        keys = leaf.program.slot_keys[0]
        y, updates = extend(leaf, {slot: past[key] for slot, key in keys.items()}, x, frame)
        return y, {keys[slot]: update for slot, update in updates.items()}

    def forward(
        self, leaf: LucidSolve, x: Mapping[str, Tensor], frame: Frame
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        system = LucidMatrix(leaf, x, frame, backward=False)
        y = torch.empty_like(x["v"], memory_format=torch.contiguous_format)
        rho = torch.empty_like(y) if leaf.beta else None
        system.solve(x["v"], y, rho)
        return y, () if rho is None else (rho,)

    def backward(
        self,
        leaf: LucidSolve,
        x: Mapping[str, Tensor],
        frame: Frame,
        out: Tensor,
        residuals: tuple[Tensor, ...],
        cotangent: Tensor,
    ) -> dict[str, Tensor]:
        system = LucidMatrix(leaf, x, frame, backward=True)
        d_v = torch.empty_like(x["v"], memory_format=torch.contiguous_format)
        (rho,) = residuals or (None,)
        sums = system.solve(cotangent, d_v, rho, out)
        gradients = {"v": d_v, **system.metric_gradient(out, d_v, sums.keys)}
        if sums.beta is not None:
            gradients["lucid_beta"] = sums.beta.to(x["lucid_beta"].dtype)
        return gradients

    def residual_shapes(
        self, leaf: LucidSolve, inputs: Mapping[str, ArraySpec]
    ) -> tuple[ArraySpec, ...]:
        return (ArraySpec(*inputs["v"]),) if leaf.beta else ()
