"""LUCID's solve with cached solved values on all processes (`solve.py`).

    y_t = β_t (v_t − Σ_r Σ_{j of r} Φ_tj y_j − Σ_{new j < t} Φ_tj y_j)

The sum over process r's tokens is softmax attention of the new keys to its cached keys, without
normalisation: e^{λ − s d} o, with output o and log-sum-exp λ. One exchange adds up the sums, and
every process solves the system of the new tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from precondattn.arrays import upcast
from precondattn.parallel.partial_attention import with_lse
from precondattn.parallel.solve import attention_of
from precondattn.parallel.torch import solve
from precondattn.parallel.torch.step import DividedStep, Shape
from precondattn.parallel.ways import DividedPiece
from precondattn.spec.lucid import LucidSolve
from precondattn.spec.rms_norm import rms, rms_norm


def prefilled(
    piece: DividedPiece, begin: Mapping[str, Tensor] | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """y of this process's tokens, and their rows by slot name."""
    y = solve.output(piece)
    return y, _rows(piece.leaf, piece.inputs["k"], y)


def part_shape(step: DividedStep) -> Shape:
    """The shape of the sums, one for each new value (b, t, n, e)."""
    return tuple(step.inputs["v"].shape)


def part(step: DividedStep) -> Tensor:
    """The sum of Φ y over this process's rows."""
    leaf, k = step.leaf, upcast(step.inputs["k"])
    if not step.rows:
        return torch.zeros(part_shape(step), dtype=k.dtype, device=k.device)
    keys, y = upcast(step.past["key"]), upcast(step.past["solved"])
    if leaf.normalize == "keys":
        r = step.past["rms"][..., None]  # Unused rows have 0.
        k, keys = rms_norm(k, leaf.eps), keys / torch.where(r > 0, r, 1.0)
    softmax, shift = attention_of(leaf, k.shape[-1])
    out, lse = with_lse(softmax, k, keys, y, **step.of_past())
    return torch.exp(lse - shift)[..., None] * out


def stepped(step: DividedStep, parts: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """y of the new tokens, and their rows by slot name."""
    assert parts is not None  # `part_shape` is not None.
    inputs = {name: upcast(x) for name, x in step.inputs.items()}
    inputs["v"] = inputs["v"] - parts.sum(0)
    y = step.leaf(**inputs, **step.of_new()).to(step.inputs["v"].dtype)
    return y, _rows(step.leaf, step.inputs["k"], y)


def _rows(leaf: LucidSolve, k: Tensor, y: Tensor) -> dict[str, Tensor]:
    rows = {"key": k, "solved": y}
    if leaf.normalize == "keys":
        rows["rms"] = rms(upcast(k), leaf.eps)[..., 0]
    return rows
