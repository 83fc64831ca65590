"""LUCID's solve as a leaf of the backend: supported calls, and their launches (`matrix.py`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from precondattn.backend import Request
from precondattn.cache import Updates
from precondattn.frame import Frame
from precondattn.kernel_backend.lucid import LucidSolveSupport
from precondattn.spec.lucid import LucidSolve
from precondattn.spec.metric import DOT
from precondattn_triton.lucid import extension, transported_extension
from precondattn_triton.lucid.matrix import LucidMatrix
from precondattn_triton.path.blocks import WIDEST

FEWEST_NEW_TOKENS = 16
"""New tokens from which on a step copies the cache to its workspace; fewer read the cache once."""


class LucidSolveKernels(LucidSolveSupport):
    """The leaf `LucidSolve`."""

    only_dot = False

    def refuses(self, leaf: LucidSolve, request: Request) -> str | None:
        reason = super().refuses(leaf, request)
        if reason is not None or request.verb != "extend":
            return reason
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
