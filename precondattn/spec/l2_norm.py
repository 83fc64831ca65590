"""Rows of length 1.

    L2(x) = x / n,    n = √(‖x‖² + ε),    and with a gain γ:  γ ∘ L2(x)

The delta rule needs it for keys, and CCQ for queries and keys. ε is inside the root, as in
flash-linear-attention; L2(0) = 0 for ε = 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from precondattn.arrays import Array, namespace, stop_gradient
from precondattn.spec.array_functions import row_sum
from precondattn.spec.norm import RowNorm


def _scaled(x: Array, eps: float) -> tuple[Array, Array, Array]:
    """x / size, √(‖x‖² + ε) / size (1 where it is 0), and the size, for rows (…, d).

    A row is divided by its largest entry before it is squared, so that no square overflows or
    underflows. The result does not depend on the divisor, which is constant for the gradient.
    """
    xp = namespace(x)
    size = stop_gradient(xp.max(xp.abs(x), axis=-1, keepdims=True))
    size = xp.clip(size, min=math.sqrt(eps))
    if eps >= 1e-60:  # √ε is not 0 in float32: the size is positive, and the square at least 1.
        scaled = x / size
        return scaled, xp.sqrt(row_sum(scaled * scaled) + (math.sqrt(eps) / size) ** 2), size
    size = xp.where(size > 0, size, 1.0)
    scaled = x / size
    square = row_sum(scaled * scaled)
    return scaled, xp.sqrt(xp.where(square > 0, square, 1.0)), size


def length(x: Array, eps: float) -> Array:
    """√(‖x‖² + ε) along the last axis, which becomes an axis of size 1; 1 where it is 0."""
    _, root, size = _scaled(x, eps)
    return size * root


def l2_norm(x: Array, eps: float) -> Array:
    scaled, root, _ = _scaled(x, eps)
    return scaled / root


def l2_norm_vjp(x: Array, eps: float, cotangent: Array) -> Array:
    """dx = (g − y (y·g)) / n with y = L2(x), exact for every ε."""
    scaled, root, size = _scaled(x, eps)
    y = scaled / root
    return (cotangent - y * row_sum(y * cotangent)) / (size * root)


@dataclass(frozen=True)
class L2Norm(RowNorm):
    """Rows L2(x) of length 1; with the option `gain`, times an input `gain` (d).

    Source: CCQ (arXiv 2606.01294) 3; gated DeltaNet (arXiv 2412.06464) 3.4.

    Examples
    --------
    >>> import numpy as np
    >>> L2Norm(eps=0.0)(np.asarray([3.0, 4.0]).reshape(1, 1, 1, 2)).ravel()
    array([0.6, 0.8])
    """

    name: ClassVar[str] = "l2_norm"
    variants: ClassVar[tuple[str, ...]] = ("l2_norm[gain=true]",)

    def normalized(self, x: Array) -> Array:
        return l2_norm(x, self.eps)

    def normalized_vjp(self, x: Array, cotangent: Array) -> Array:
        return l2_norm_vjp(x, self.eps, cotangent)
