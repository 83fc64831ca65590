"""The leaf of differential attention: the difference of two attention outputs.

    o = o₁ − λ o₂

Source: Differential Transformer (arXiv 2410.05258) Eq. 1; LUCID Table 1; LASER 4.4.

Gradient: do₁ = do, do₂ = −λ do, dλ = −Σ do·o₂. Where the two maps nearly agree and λ is near 1 the
difference suffers from cancellation, so it is computed in float32 or wider.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Inputs, TokenWise, options
from precondattn.arrays import Array, Arrays, ByName, Residuals, namespace
from precondattn.frame import Frame

PER = {"layer": "", "head": "h", "token": "b t h"}
"""The pattern of λ: one number, one for each head, or one for each head at each token."""


@dataclass(frozen=True)
class Difference(TokenWise):
    """o₁ − λ o₂, with λ = `lam` a number, one for each head, or one for each token and head.

    Source: Differential Transformer (arXiv 2410.05258) Eq. 1.

    Examples
    --------
    >>> import numpy as np
    >>> Difference()(np.ones((1, 1, 1, 2)), np.ones((1, 1, 1, 2)), lam=np.asarray(0.25)).ravel()
    array([0.75, 0.75])
    """

    name: ClassVar[str] = "difference"
    variants: ClassVar[tuple[str, ...]] = ("difference[per=head]", "difference[per=token]")
    per: str = options.choice("layer", "head", "token")

    output = "b t h e"

    @property
    def inputs(self) -> Inputs:
        return Inputs(o1="b t h e", o2="b t h e", lam=PER[self.per])

    def _lam(self, x: ByName) -> Array:
        return x["lam"] if self.per == "layer" else x["lam"][..., None]

    def forward(self, x: ByName, frame: Frame) -> tuple[Array, Residuals]:
        return x["o1"] - self._lam(x) * x["o2"], ()

    def backward(
        self, x: ByName, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        xp = namespace(cotangent)
        axes = {"layer": None, "head": (0, 1, 3), "token": 3}[self.per]
        d_lam = -xp.sum(cotangent * x["o2"], axis=axes)
        return {
            "o1": cotangent,
            "o2": -self._lam(x) * cotangent,
            "lam": xp.reshape(d_lam, x["lam"].shape),
        }
