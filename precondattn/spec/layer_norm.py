"""Layer norm without bias.

    LN(x) = (x − mean(x)) / √(mean((x − mean(x))²) + ε),    and with a gain γ:  γ ∘ LN(x)

Source: Ba et al. 2016 (arXiv 1607.06450) Eq. 4; LASER §4.1 puts it on queries and keys.

Gradient, with g = γ ∘ cotangent, x̂ = LN(x) and σ the root:

    dx = (g − mean(g) − x̂ mean(g ∘ x̂)) / σ,    dγ = Σ cotangent ∘ x̂.

The constant row with ε = 0 is taken to be 0 (σ := 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from precondattn.arrays import Array, namespace
from precondattn.declaration import Inputs
from precondattn.frame import Frame
from precondattn.mechanism import Arrays, Residuals, TokenWise
from precondattn.options import flag, non_negative
from precondattn.spec.array_functions import sum_rows
from precondattn.spec.rms_norm import rms


def _mean(x: Array) -> Array:
    return namespace(x).mean(x, axis=-1, keepdims=True)


@dataclass(frozen=True)
class LayerNorm(TokenWise):
    """LN(x), row by row; with `gain` times an input `gain` (d). There is no bias.

    Source: Ba et al. 2016 (arXiv 1607.06450) Eq. 4.

    Examples
    --------
    >>> import numpy as np
    >>> LayerNorm(eps=0.0)(np.asarray([1.0, 3.0]).reshape(1, 1, 1, 2)).ravel()
    array([-1.,  1.])
    """

    name: ClassVar[str] = "layer_norm"
    variants: ClassVar[tuple[str, ...]] = ("layer_norm[gain=true]",)
    eps: float = non_negative(1e-6)
    gain: bool = flag(False)

    output = "b t h d"

    @property
    def inputs(self) -> Inputs:
        return Inputs(x="b t h d", gain="d") if self.gain else Inputs(x="b t h d")

    def forward(self, x: Mapping[str, Array], frame: Frame) -> tuple[Array, Residuals]:
        centred = x["x"] - _mean(x["x"])
        normed = centred / rms(centred, self.eps)
        return (normed * x["gain"] if self.gain else normed), ()

    def backward(
        self,
        x: Mapping[str, Array],
        frame: Frame,
        out: Array,
        residuals: Residuals,
        cotangent: Array,
    ) -> Arrays:
        centred = x["x"] - _mean(x["x"])
        sigma = rms(centred, self.eps)
        normed = centred / sigma
        g = cotangent * x["gain"] if self.gain else cotangent
        gradients = {"x": (g - _mean(g) - normed * _mean(g * normed)) / sigma}
        if self.gain:
            gradients["gain"] = sum_rows(cotangent * normed)
        return gradients
