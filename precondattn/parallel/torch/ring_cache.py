"""Softmax attention and LASER with cached keys on all processes (`ring.py`).

    λ = log Σ_r e^{λ_r},    o = Σ_r e^{λ_r − λ} o_r,    for LASER    o = log Σ_r e^{λ_r − λ + o_r}

where o_r and λ_r are computed from the new queries and the cached keys of process r. One more part
is the attention of the new tokens among themselves, which every process computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from precondattn.arrays import upcast
from precondattn.parallel.ring_reads import read_of
from precondattn.parallel.torch import ring
from precondattn.parallel.torch.step import DividedStep, Shape
from precondattn.parallel.ways import DividedPiece


def prefilled(
    piece: DividedPiece, begin: Mapping[str, Tensor] | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of this process's tokens, and their rows by slot name."""
    return ring.output(piece), {"key": piece.inputs["k"], "value": piece.inputs["v"]}


def part_shape(step: DividedStep) -> Shape:
    """The shape of o_r and λ_r in one tensor (b, t, h, e + 1)."""
    return (*step.inputs["q"].shape[:3], step.inputs["v"].shape[-1] + 1)


def part(step: DividedStep) -> Tensor:
    """o_r and λ_r over this process's keys."""
    leaf, q = step.leaf, upcast(step.inputs["q"])
    if not step.rows:
        empty = q.new_zeros(part_shape(step))
        empty[..., -1] = -math.inf
        return empty
    keys, values = upcast(step.past["key"]), upcast(step.past["value"])
    out, lse = read_of(replace(leaf, causal=False), step.of_past()).attend(q, keys, values)
    return torch.cat([out, lse[..., None]], -1)


def stepped(step: DividedStep, parts: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of the new tokens, and their rows by slot name."""
    assert parts is not None  # `part_shape` is not None.
    q, k, v = (step.inputs[name] for name in "qkv")
    over_parts = read_of(step.leaf, step.of_new())
    whole = over_parts.attend(upcast(q), upcast(k), upcast(v))
    for packed in parts:
        whole = over_parts.merged(whole, (packed[..., :-1], packed[..., -1]))
    return whole[0].to(v.dtype), {"key": k, "value": v}
