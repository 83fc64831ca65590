"""Differential attention as a group of the backend: supported calls, and their launches.

    o = o₁ − λ o₂,    D₂ = rowsum(do ∘ o₂),    dλ = −D₂

Each map is read by the kernels of softmax attention, in float32: the difference cancels if the maps
nearly agree. Backward, the first has the cotangent do, with rowsum(do ∘ o) + λ D₂ as its row sums,
and the second −λ do.

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
from precondattn_triton.softmax.differential_decode import (
    differential_step,
    refuses_differential_step,
)
from precondattn_triton.softmax.score_tiles import row_products
from precondattn_triton.softmax.softmax_backward import attention_backward
from precondattn_triton.softmax.softmax_forward import (
    AttentionCall,
    attention_call,
    attention_forward,
)
from precondattn_triton.softmax.widths import refuses_widths

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

    @property
    def maps(self) -> tuple[dict[str, str], dict[str, str]]:
        """The names of q, k and v of both maps."""
        first = {"q": self.q1, "k": self.k1, "v": self.v}
        return first, {**first, "q": self.q2, "k": self.k2}


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
        wires = _wiring(group)
        first, second = (attention_forward(call, torch.float32) for call in _calls(wires, x, frame))
        full = first.out - _weight(wires, x, frame)[..., None] * second.out
        residuals = torch.stack((first.logs, second.logs)), second.out
        if x[wires.v].dtype == torch.float32:
            return full, residuals
        return full.to(x[wires.v].dtype), (*residuals, full)

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
        wires = _wiring(group)
        calls = _calls(wires, x, frame)
        logs, second, *float_outs = residuals
        v, q_valid = x[wires.v], calls[0].masks.q_valid
        weight, d_out = _weight(wires, x, frame), cotangent.to(v.dtype)
        full = float_outs[0] if float_outs else out.contiguous()
        of_out, of_second = (row_products(d_out, o, logs[0], q_valid) for o in (full, second))
        d_sums = of_out + weight.transpose(1, 2) * of_second
        # The row sums of the second map have the rounding of its cotangent.
        d_second = (-weight[..., None] * d_out).to(v.dtype)
        sums_of_second = row_products(d_second, second, logs[1], q_valid)
        d_maps = (
            attention_backward(calls[0], None, logs[0], d_sums, d_out, torch.float32),
            attention_backward(calls[1], None, logs[1], sums_of_second, d_second, torch.float32),
        )
        d_lam = -of_second.transpose(1, 2)
        d_lam = {"layer": d_lam.sum(), "head": d_lam.sum((0, 1)), "token": d_lam}[wires.per]
        gradients = {wires.lam: d_lam}
        for map_names, d_map in zip(wires.maps, d_maps, strict=True):
            # An input of both maps gets the sum of both gradients.
            for name, gradient in d_map.items():
                named = {**map_names, **wires.options}[name]
                other = gradients.get(named)
                gradients[named] = gradient if other is None else other + gradient
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


def _calls(
    wires: DifferentialWiring, x: Tensors, frame: Frame
) -> tuple[AttentionCall, AttentionCall]:
    """The call of each map as its kernels read it."""
    names, of_second = wires.maps
    inputs = {name: x[in_group] for name, in_group in {**names, **wires.options}.items()}
    first = attention_call(wires.softmax, inputs, frame)
    q, k = (x[of_second[name]].to(first.v.dtype) for name in ("q", "k"))
    return first, first._replace(q=q, k=k)


def _weight(wires: DifferentialWiring, x: Tensors, frame: Frame) -> torch.Tensor:
    """λ (b, t, h) in float32, 0 for padding, whose content may be anything."""
    weight = x[wires.lam].expand(x[wires.q1].shape[:3]).float()
    if frame.q_valid is not None:
        weight = weight.where(frame.q_valid[..., None], 0)
    return weight
