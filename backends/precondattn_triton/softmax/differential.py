"""Differential attention as a backend's group: which calls the kernels take, and how.

Kept for the gradient: the logarithms λ of both maps (2, b, h, t), o₂ in float32 (b, t, h, e), and,
where the output is rounded to half precision, the output as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch

import precondattn as pa
from precondattn.algebra.program import Program
from precondattn.backend import ArraySpec, Request
from precondattn.frame import Frame
from precondattn.spec.difference import Difference
from precondattn.spec.read import MEAN
from precondattn_triton.softmax.differential_backward import differential_backward
from precondattn_triton.softmax.differential_forward import Maps, differential_forward
from precondattn_triton.softmax.score_tiles import row_products
from precondattn_triton.softmax.widths import refuses_widths
from precondattn_triton.tiles import masks_of

Tensors = Mapping[str, torch.Tensor]


class Wiring(NamedTuple):
    """The group's names of what the two maps read."""

    q1: str
    k1: str
    q2: str
    k2: str
    v: str
    lam: str
    softmax: Any
    per: str


@cache
def wiring(program: Program) -> Wiring | None:
    """Of y = softmax(q, k, v) − λ softmax(q2, k2, v); None where a group is none."""
    if [*map(type, program.leaves)] != [pa.Softmax, pa.Softmax, Difference]:
        return None
    made = {call.out: call for call in program.calls}
    last = dict(program.calls[2].arguments)
    if {last["o1"], last["o2"]} != {call.out for call in program.calls[:2]}:
        return None
    first, second = made[last["o1"]], made[last["o2"]]
    one, two = dict(first.arguments), dict(second.arguments)
    if first.leaf != second.leaf or one["v"] != two["v"]:
        return None
    difference: Any = program.calls[2].leaf
    names = one["q"], one["k"], two["q"], two["k"], one["v"], last["lam"]
    return Wiring(*names, first.leaf, difference.per)


class Differential:
    """Of the group `y1 = softmax(q, k, v); y2 = softmax(q=q2, k=k2, v); out = difference(…)`."""

    def refuses(self, group: Any, request: Request) -> str | None:
        """Why not; None where the kernels do this call."""
        own = wiring(group.program)
        if own is None:
            return "its difference is that of two like softmax attentions to the same values"
        if request.verb not in ("forward", "vjp"):
            return "has no kernel for differential attention that extends a cache"
        for option, is_used in (
            ("a bias", own.softmax.bias),
            ("a forget gate", own.softmax.forget != "none"),
            ("a window", own.softmax.window is not None),
            ("LASER's read", own.softmax.read != MEAN),
        ):
            if is_used:
                return f"has no kernel for differential attention with {option}"
        shapes = dict(request.shapes)
        q, k, v = (shapes[name] for name in (own.q1, own.k1, own.v))
        if 0 in q + k + v:
            return "its kernels for differential attention take no empty arrays"
        return refuses_widths("differential attention", request.dtype, k[3], v[3])

    def forward(
        self, group: Any, x: Tensors, frame: Frame
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The output (b, t, h, e) in the dtype of the values, and the residuals."""
        own, maps, v, lam = _inputs(group, x)
        masks = masks_of(frame, *maps.q1.shape[:2])
        scale, causal = own.softmax.scale_for(maps.q1.shape[3]), own.softmax.causal
        read = differential_forward(maps, v, lam, masks, scale=scale, causal=causal)
        residuals = read.logs, read.second
        return read.out, residuals if read.full is read.out else (*residuals, read.full)

    def backward(
        self,
        group: Any,
        x: Tensors,
        frame: Frame,
        out: torch.Tensor,
        residuals: tuple[torch.Tensor, ...],
        cotangent: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """The gradients of all inputs, in their dtypes."""
        own, maps, v, lam = _inputs(group, x)
        masks = masks_of(frame, *maps.q1.shape[:2])
        logs, second, *full = residuals
        d_out = cotangent.to(v.dtype)
        of_out = row_products(d_out, full[0] if full else out.contiguous(), logs[0], masks.q_valid)
        of_second = row_products(d_out, second, logs[0], masks.q_valid)
        weight = lam.transpose(1, 2).float()
        if masks.q_valid is not None:  # Padding may hold anything.
            weight = weight.where(masks.q_valid.bool()[:, None], 0)
        d_sums = torch.stack((of_out + weight * of_second, of_second))
        scale, causal = own.softmax.scale_for(maps.q1.shape[3]), own.softmax.causal
        d, d_v = differential_backward(
            maps, v, lam, masks, logs, d_sums, d_out, scale=scale, causal=causal
        )
        d_lam = -of_second.transpose(1, 2)
        d_lam = {"layer": d_lam.sum(), "head": d_lam.sum((0, 1)), "token": d_lam}[own.per]
        found: dict[str, torch.Tensor] = {}
        for name, gradient in zip(own[:6], (*d, d_v, d_lam), strict=True):
            # What both maps read has the sum of both gradients.
            known = found.get(name)
            found[name] = gradient if known is None else known.float() + gradient.float()
        return {name: gradient.to(x[name].dtype) for name, gradient in found.items()}

    def residual_shapes(self, group: Any, inputs: Mapping[str, ArraySpec]) -> tuple[ArraySpec, ...]:
        """What `forward` gives as residuals."""
        own = wiring(group.program)
        assert own is not None  # `refuses` has said so.
        b, t, h, _ = inputs[own.q1].shape
        (_, _, _, e), dtype = inputs[own.v]
        kept = ArraySpec((2, b, h, t), "float32"), ArraySpec((b, t, h, e), "float32")
        return kept if dtype == "float32" else (*kept, ArraySpec((b, t, h, e), "float32"))


def _inputs(group: Any, x: Tensors) -> tuple[Wiring, Maps, torch.Tensor, torch.Tensor]:
    """Both maps and the values, in the dtype of the values; λ (b, t, h), repeated by strides."""
    own = wiring(group.program)
    assert own is not None  # `refuses` has said so.
    v = x[own.v]
    maps = Maps(*(x[name].to(v.dtype) for name in own[:4]))
    return own, maps, v, x[own.lam].expand(maps.q1.shape[:3])
