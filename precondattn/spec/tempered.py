"""A temperature of the logits, applied by dividing the query.

    s ⟨q, k⟩ / τ = s ⟨q / τ, k⟩,    τ > 0

Source: LASER 4.1. Gradient: dq = dx / τ, dτ = −Σ dx·q / τ².
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Inputs, TokenWise, options
from precondattn.arrays import Array, Arrays, ByName, Residuals, namespace
from precondattn.frame import Frame

PER = {"layer": "in (0, inf)", "head": "h in (0, inf)"}
"""The pattern of τ: one number, or one for each query head."""


@dataclass(frozen=True)
class Tempered(TokenWise):
    """q / τ, with τ a number, or one for each head.

    Source: LASER (arXiv 2411.03493) 4.1.

    Examples
    --------
    >>> import numpy as np
    >>> Tempered()(np.ones((1, 1, 1, 2)), tau=np.asarray(4.0)).ravel()
    array([0.25, 0.25])
    """

    name: ClassVar[str] = "tempered"
    variants: ClassVar[tuple[str, ...]] = ("tempered[per=head]",)
    per: str = options.choice("layer", "head")

    output = "b t h d"

    @property
    def inputs(self) -> Inputs:
        return Inputs(q="b t h d", tau=PER[self.per])

    def _tau(self, x: ByName) -> Array:
        return x["tau"] if self.per == "layer" else x["tau"][None, None, :, None]

    def forward(self, x: ByName, frame: Frame) -> tuple[Array, Residuals]:
        return x["q"] / self._tau(x), ()

    def backward(
        self, x: ByName, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        xp, tau = namespace(cotangent), self._tau(x)
        axes = None if self.per == "layer" else (0, 1, 3)
        d_tau = -xp.sum(cotangent * out, axis=axes) / x["tau"]
        return {"q": cotangent / tau, "tau": xp.reshape(d_tau, x["tau"].shape)}
