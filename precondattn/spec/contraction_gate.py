"""CCQ's gate: the strength of the contraction, computed from the query's direction.

    λ_t = σ(w_h·q̄_t + b_h),    q̄ = L2(q),    for every query head h

Source: CCQ (arXiv 2606.01294) Algorithms 1 and 2 (Eq. 9 writes q for q̄). The initial b is
log(0.1 / 0.9) = −2.197, so that λ = 0.1. Gradient, with dz = dλ λ (1 − λ):

    dw = Σ dz q̄,    db = Σ dz,    dq̄ = dz w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Inputs, TokenWise, options
from precondattn.arrays import Array, Arrays, ByName, Residuals, namespace
from precondattn.frame import Frame
from precondattn.spec.l2_norm import l2_norm, l2_norm_vjp
from precondattn.spec.scaled_dims import logistic


@dataclass(frozen=True)
class ContractionGate(TokenWise):
    """λ = σ(w·q̄ + b) of shape (b, t, h), with `weight` (h, d) and `bias` (h).

    Source: CCQ (arXiv 2606.01294), Eq. 9, Algorithms 1 and 2.

    Parameters
    ----------
    eps : float
        In the norm: q̄ = q / √(‖q‖² + eps).

    Examples
    --------
    With the initial parameters, and w = 0:

    >>> import numpy as np, precondattn as pa
    >>> q = np.random.default_rng(0).normal(size=(1, 2, 3, 4))
    >>> pa.contraction_gate(q, weight=np.zeros((3, 4)), bias=np.full(3, -2.197)).round(3)[0, 0]
    array([0.1, 0.1, 0.1])
    """

    name: ClassVar[str] = "contraction_gate"

    eps: float = options.non_negative(1e-6)

    inputs = Inputs(q="b t h d", weight="h d", bias="h")
    output = "b t h"

    def forward(self, x: ByName, frame: Frame) -> tuple[Array, Residuals]:
        xp, unit = namespace(x["q"]), l2_norm(x["q"], self.eps)
        return logistic(xp.sum(unit * x["weight"], axis=-1) + x["bias"]), ()

    def backward(
        self, x: ByName, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        xp = namespace(out)
        d_z = cotangent * out * (1.0 - out)
        column = d_z[..., None]
        return {
            "q": l2_norm_vjp(x["q"], self.eps, column * x["weight"]),
            "weight": xp.sum(column * l2_norm(x["q"], self.eps), axis=(0, 1)),
            "bias": xp.sum(d_z, axis=(0, 1)),
        }
