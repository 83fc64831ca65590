"""Layer norm without bias.

    LN(x) = (x − mean(x)) / √(mean((x − mean(x))²) + ε),    and with a gain γ:  γ ∘ LN(x)

Source: Ba et al. 2016 (arXiv 1607.06450) Eq. 4; LASER 4.1 applies it to queries and keys.

Gradient, with g = γ ∘ cotangent, x̂ = LN(x) and σ the root:

    dx = (g − mean(g) − x̂ mean(g ∘ x̂)) / σ,    dγ = Σ cotangent ∘ x̂,

which is the RMS norm of the centred row, and its gradient, centred.

LN of a constant row is 0 for ε = 0 (σ := 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.arrays import Array, namespace
from precondattn.spec.norm import RowNorm
from precondattn.spec.rms_norm import rms_norm, rms_norm_vjp


def _centred(x: Array) -> Array:
    return x - namespace(x).mean(x, axis=-1, keepdims=True)


@dataclass(frozen=True)
class LayerNorm(RowNorm):
    """The layer norm LN(x) of rows; with the option `gain`, times an input `gain` (d). No bias.

    Source: Ba et al. 2016 (arXiv 1607.06450) Eq. 4.

    Examples
    --------
    >>> import numpy as np
    >>> LayerNorm(eps=0.0)(np.asarray([1.0, 3.0]).reshape(1, 1, 1, 2)).ravel()
    array([-1.,  1.])
    """

    name: ClassVar[str] = "layer_norm"
    variants: ClassVar[tuple[str, ...]] = ("layer_norm[gain=true]",)

    def normalized(self, x: Array) -> Array:
        return rms_norm(_centred(x), self.eps)

    def normalized_vjp(self, x: Array, cotangent: Array) -> Array:
        return _centred(rms_norm_vjp(_centred(x), self.eps, cotangent))
