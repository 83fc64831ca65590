"""Hedgehog: a learnt feature map with positive features that sum to 1.

    φ(x) = softmax([y, −y]) ∈ R^{2d},    y = c (W x + b)

Source: Hedgehog (arXiv 2402.04347) Eq. 6, with a softmax over the features; the baseline of CCQ
4.1. W is initialised with the identity and b with 0; flash-linear-attention has c = 2. Gradient:

    dz = φ ∘ (dφ − φ·dφ),    dy = c (dz_{1…d} − dz_{d+1…2d}),
    dx = Wᵀ dy,    dW = Σ dy xᵀ,    db = Σ dy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Flops, Inputs, TokenWise, options
from precondattn.arrays import Array, Arrays, ByName, Residuals, namespace
from precondattn.frame import Frame
from precondattn.spec.array_functions import softmax, softmax_vjp, transpose


@dataclass(frozen=True)
class HedgehogMap(TokenWise):
    """softmax([y, −y]), y = c (W x + b), with W = `weight` (d, d) and b = `bias` (d), or per head.

    Source: Hedgehog (arXiv 2402.04347), Eq. 6; CCQ (arXiv 2606.01294) 4.1.

    Examples
    --------
    >>> import numpy as np
    >>> features = HedgehogMap()(np.ones((1, 1, 1, 2)), weight=np.eye(2), bias=np.zeros(2))
    >>> features.shape, features.sum().round(12)
    ((1, 1, 1, 4), np.float64(1.0))
    """

    name: ClassVar[str] = "hedgehog_map"
    variants: ClassVar[tuple[str, ...]] = ("hedgehog_map[factor=2,per=head]",)

    factor: float = options.positive(1.0)
    per: str = options.choice("layer", "head")

    output = "b t h 2*d"

    @property
    def inputs(self) -> Inputs:
        each = "h " if self.per == "head" else ""
        return Inputs(x="b t h d", weight=f"{each}d d", bias=f"{each}d")

    def flops(self, sizes: Mapping[str, int]) -> Flops | None:
        """One product with a d × d matrix for each row."""
        row = 2.0 * sizes["d"] * sizes["d"] * sizes["h"]
        return Flops(row * sizes["t"], 2 * row * sizes["t"], row)

    def forward(self, x: ByName, frame: Frame) -> tuple[Array, Residuals]:
        xp = namespace(x["x"])
        # One row vector per token and head, so that `weight` may have a head axis.
        y = (x["x"][..., None, :] @ transpose(x["weight"]))[..., 0, :]
        y = self.factor * (y + xp.reshape(x["bias"], (1, 1, -1, y.shape[-1])))
        return softmax(xp.concat([y, -y], axis=-1)), ()

    def backward(
        self, x: ByName, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        xp, d = namespace(out), x["x"].shape[-1]
        d_z = softmax_vjp(out, cotangent)
        d_y = self.factor * (d_z[..., :d] - d_z[..., d:])
        if self.per == "layer":
            rows = (-1, d)
            d_weight = transpose(xp.reshape(d_y, rows)) @ xp.reshape(x["x"], rows)
            d_bias = xp.sum(d_y, axis=(0, 1, 2))
        else:
            heads_first, h = (2, 3, 0, 1), x["x"].shape[2]
            left = xp.reshape(xp.permute_dims(d_y, heads_first), (h, d, -1))
            right = xp.reshape(xp.permute_dims(x["x"], heads_first), (h, d, -1))
            d_weight = left @ transpose(right)
            d_bias = xp.sum(d_y, axis=(0, 1))
        d_x = (d_y[..., None, :] @ x["weight"])[..., 0, :]
        return {"x": d_x, "weight": d_weight, "bias": d_bias}
