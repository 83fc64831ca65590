"""A learnt scale for every dimension of the query.

    q ↦ q ∘ softplus(p) / ln 2,    p ∈ R^d

The division by ln 2 makes p = 0 the identity, as in the public code that LASER builds on. LASER's
text has softplus(p) alone, which multiplies every logit by ln 2 at p = 0. Source: LASER 4.1.

Gradient, with σ the logistic function: dq = dx ∘ softplus(p) / ln 2, dp = Σ dx ∘ q ∘ σ(p) / ln 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Inputs, TokenWise, options
from precondattn.arrays import Array, Arrays, ByName, Residuals, namespace
from precondattn.frame import Frame
from precondattn.spec.array_functions import sum_rows


def softplus(x: Array) -> Array:
    """log(1 + eˣ), without overflow for large x and without loss of accuracy for x ≪ 0."""
    xp = namespace(x)
    return xp.logaddexp(x, xp.zeros_like(x))


def logistic(x: Array) -> Array:
    """1 / (1 + e⁻ˣ)."""
    return namespace(x).exp(-softplus(-x))


@dataclass(frozen=True)
class ScaledDims(TokenWise):
    """q ∘ softplus(p) / ln 2, with p = `per_dim` (d); without `normalize`, q ∘ softplus(p).

    Source: LASER (arXiv 2411.03493) 4.1.

    Examples
    --------
    >>> import numpy as np
    >>> ScaledDims()(np.ones((1, 1, 1, 2)), per_dim=np.zeros(2)).ravel().round(12)
    array([1., 1.])
    """

    name: ClassVar[str] = "scaled_dims"
    variants: ClassVar[tuple[str, ...]] = ("scaled_dims[normalize=false]",)
    normalize: bool = options.flag(True)

    inputs = Inputs(q="b t h d", per_dim="d")
    output = "b t h d"

    def _unit(self) -> float:
        return math.log(2) if self.normalize else 1.0

    def forward(self, x: ByName, frame: Frame) -> tuple[Array, Residuals]:
        return x["q"] * (softplus(x["per_dim"]) / self._unit())[None, None, None, :], ()

    def backward(
        self, x: ByName, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        p = x["per_dim"]
        return {
            "q": cotangent * (softplus(p) / self._unit())[None, None, None, :],
            "per_dim": sum_rows(cotangent * x["q"]) * (logistic(p) / self._unit()),
        }
