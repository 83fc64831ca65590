"""Differential attention as a group of the backend: supported calls, and their launches.

Residuals: the log-sum-exps λ of both maps (2, b, h, t), o₂ in float32 (b, t, h, e), and, if the
output is rounded to half precision, the output in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch

from precondattn.algebra.piece import Piece
from precondattn.algebra.program import Program
from precondattn.backend import ArraySpec, Request
from precondattn.cache import Updates
from precondattn.frame import Frame
from precondattn.kernel_backend.attention_options import SINK, SLOPES, SOFTCAP, declined_option
from precondattn.limits import KEPT
from precondattn.spec.difference import Difference
from precondattn.spec.laser import LOG_MEAN_EXP
from precondattn.spec.softmax import Softmax
from precondattn_triton.softmax.differential_backward import differential_backward
from precondattn_triton.softmax.differential_decode import (
    differential_step,
    refuses_differential_step,
)
from precondattn_triton.softmax.differential_forward import (
    DifferentialCall,
    Maps,
    differential_forward,
)
from precondattn_triton.softmax.score_options import options_of
from precondattn_triton.softmax.score_tiles import row_products
from precondattn_triton.softmax.widths import refuses_widths
from precondattn_triton.tiles import masks_of

Tensors = Mapping[str, torch.Tensor]

SUPPORTED = SOFTCAP, SINK, SLOPES
"""The options of both maps, besides a window."""


class DifferentialWiring(NamedTuple):
    """The inputs of both maps, under their names in the group."""

    q1: str
    k1: str
    q2: str
    k2: str
    v: str
    lam: str
    softmax: Softmax
    options: Mapping[str, str]
    """The names of the inputs of both maps' options, by the names of `Softmax`."""
    per: str


@lru_cache(maxsize=KEPT)
def wiring(program: Program) -> DifferentialWiring | None:
    """The inputs' names in y = softmax(q, k, v) − λ softmax(q2, k2, v); None for other programs."""
    if [*map(type, program.leaves)] != [Softmax, Softmax, Difference]:
        return None
    call_of = {call.out: call for call in program.calls}
    last = dict(program.calls[2].arguments)
    if {last["o1"], last["o2"]} != {call.out for call in program.calls[:2]}:
        return None
    first, second = call_of[last["o1"]], call_of[last["o2"]]
    one, two = dict(first.arguments), dict(second.arguments)
    options = {name: one[name] for name in one if name not in ("q", "k", "v")}
    if first.leaf != second.leaf or any(one[name] != two[name] for name in ("v", *options)):
        return None
    names = one["q"], one["k"], two["q"], two["k"], one["v"], last["lam"]
    softmax, _, difference = program.leaves
    assert isinstance(softmax, Softmax)
    assert isinstance(difference, Difference)
    return DifferentialWiring(*names, softmax, options, difference.per)


class DifferentialKernels:
    """The group `y1 = softmax(q, k, v); y2 = softmax(q=q2, k=k2, v); out = difference(…)`."""

    def refuses(self, group: Piece, request: Request) -> str | None:
        """The reason why the kernels do not support this call, or None."""
        wires = wiring(group.program)
        if wires is None:
            return "supports two softmax attentions with equal options and the same values only"
        if request.verb == "extend":
            return refuses_differential_step(wires.softmax, wires[:6], request)
        if request.verb not in ("forward", "vjp"):
            return "has no kernel for differential attention that extends a cache"
        if wires.softmax.read == LOG_MEAN_EXP:
            return "has no kernel for differential attention with LASER's read"
        reason = declined_option(wires.softmax, "differential attention", SUPPORTED)
        if reason is not None:
            return reason
        shapes = dict(request.shapes)
        q, k, v = (shapes[name] for name in (wires.q1, wires.k1, wires.v))
        if 0 in q + k + v:
            return "its kernels for differential attention support no empty arrays"
        # Values are computed in parts, which have the same limit in every dtype.
        return refuses_widths("differential attention", "bfloat16", k[3], v[3])

    def forward(
        self, group: Piece, x: Tensors, frame: Frame
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The output (b, t, h, e) in the dtype of the values, and the residuals."""
        read = differential_forward(_call(group, x, frame))
        residuals = read.logs, read.second
        return read.out, residuals if read.full is read.out else (*residuals, read.full)

    def backward(
        self,
        group: Piece,
        x: Tensors,
        frame: Frame,
        out: torch.Tensor,
        residuals: tuple[torch.Tensor, ...],
        cotangent: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """The gradients of all inputs, in their dtypes."""
        wires, call = _wiring(group), _call(group, x, frame)
        logs, second, *full = residuals
        q_valid, d_out = call.masks.q_valid, cotangent.to(call.v.dtype)
        of_out = row_products(d_out, full[0] if full else out.contiguous(), logs[0], q_valid)
        of_second = row_products(d_out, second, logs[0], q_valid)
        weight = call.lam.transpose(1, 2).float()
        if q_valid is not None:  # Padding may have any content.
            weight = weight.where(q_valid.bool()[:, None], 0)
        d_sums = torch.stack((of_out + weight * of_second, of_second))
        d = differential_backward(call, logs, d_sums, d_out)
        d_lam = -of_second.transpose(1, 2)
        d_lam = {"layer": d_lam.sum(), "head": d_lam.sum((0, 1)), "token": d_lam}[wires.per]
        gradients: dict[str, torch.Tensor] = {}
        for name, gradient in zip(wires[:6], (*d.maps, d.v, d_lam), strict=True):
            # An input of both maps gets the sum of both gradients.
            other = gradients.get(name)
            gradients[name] = gradient if other is None else other.float() + gradient.float()
        if d.slopes is not None:
            gradients[wires.options["slopes"]] = d.slopes
        if call.sink is not None:
            weights = (call.sink.float()[:, None] - logs).exp()
            weights[1] *= -weight
            gradients[wires.options["sink"]] = -(weights * d_sums).sum((0, 1, 3))
        return {name: gradient.to(x[name].dtype) for name, gradient in gradients.items()}

    def step(
        self, group: Piece, past: Tensors, x: Tensors, frame: Frame
    ) -> tuple[torch.Tensor, Updates]:
        """The output for a few new tokens, and the updates of the cache's buffers."""
        wires = _wiring(group)
        return differential_step(wires.softmax, wires[:6], past, x, frame)

    def residual_shapes(
        self, group: Piece, inputs: Mapping[str, ArraySpec]
    ) -> tuple[ArraySpec, ...]:
        """The shapes of the residuals of `forward`."""
        wires = _wiring(group)
        b, t, h, _ = inputs[wires.q1].shape
        (_, _, _, e), dtype = inputs[wires.v]
        always = ArraySpec((2, b, h, t), "float32"), ArraySpec((b, t, h, e), "float32")
        return always if dtype == "float32" else (*always, ArraySpec((b, t, h, e), "float32"))


def _wiring(group: Piece) -> DifferentialWiring:
    wires = wiring(group.program)
    assert wires is not None  # `refuses` has checked it.
    return wires


def _call(group: Piece, x: Tensors, frame: Frame) -> DifferentialCall:
    """A call as its kernels read it, in the dtype of the values."""
    wires = _wiring(group)
    v, softmax = x[wires.v], wires.softmax
    maps = Maps(*(x[name].to(v.dtype) for name in wires[:4]))
    b, _, h, d = maps.q1.shape
    of_softmax = {name: x[own] for name, own in wires.options.items()}
    return DifferentialCall(
        maps,
        v,
        x[wires.lam].expand(maps.q1.shape[:3]),
        of_softmax["sink"].contiguous() if softmax.sink else None,
        masks_of(frame, b),
        options_of(softmax, of_softmax, b, h),
        softmax.scale_for(d),
        softmax.causal,
    )
