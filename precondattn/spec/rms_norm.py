"""Root-mean-square norm.

    RN(x) = x / rms(x),    rms(x) = √(mean(x²) + ε),    and with a gain γ:  γ ∘ RN(x)

Source: LUCID 3.2 (with ε = 0). Rows of RN(x) have length √d when ε = 0.

RN(0) = 0 for ε = 0 (rms := 1), so that a zero key stays a zero key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.arrays import Array, namespace
from precondattn.spec.array_functions import row_sum
from precondattn.spec.norm import RowNorm


def rms(x: Array, eps: float) -> Array:
    """√(mean(x²) + ε) along the last axis, which becomes an axis of size 1; 1 where it is 0."""
    xp = namespace(x)
    mean_square = row_sum(x * x) / x.shape[-1] + eps
    if eps >= 1e-30:  # ε is not 0 in float32, so the mean is positive.
        return xp.sqrt(mean_square)
    return xp.sqrt(xp.where(mean_square > 0, mean_square, 1.0))


def rms_norm(x: Array, eps: float) -> Array:
    return x / rms(x, eps)


def rms_norm_vjp(x: Array, eps: float, cotangent: Array) -> Array:
    """dx = (g − x (x·g) / (d rms²)) / rms, exact for every ε."""
    r = rms(x, eps)
    return (cotangent - x * row_sum(x * cotangent) / (x.shape[-1] * r * r)) / r


@dataclass(frozen=True)
class RMSNorm(RowNorm):
    """RN(x), row by row; with `gain` times an input `gain` (d).

    Source: LUCID 3.2; Zhang and Sennrich 2019 (arXiv 1910.07467) Eq. 4.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.asarray([3.0, 4.0]).reshape(1, 1, 1, 2)
    >>> np.linalg.vector_norm(RMSNorm(eps=0.0)(x)).round(6) == np.sqrt(2).round(6)
    np.True_
    """

    name: ClassVar[str] = "rms_norm"
    variants: ClassVar[tuple[str, ...]] = ("rms_norm[gain=true]",)

    def normalized(self, x: Array) -> Array:
        return rms_norm(x, self.eps)

    def normalized_vjp(self, x: Array, cotangent: Array) -> Array:
        return rms_norm_vjp(x, self.eps, cotangent)
