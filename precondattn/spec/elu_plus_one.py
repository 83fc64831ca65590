"""A positive feature map without parameters.

    φ(x) = elu(x) + 1 = eˣ for x ≤ 0, x + 1 above

Source: Katharopoulos et al. 2020 (arXiv 2006.16236) Eq. 7. Gradient: dx = dφ ∘ min(φ, 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Inputs, TokenWise
from precondattn.arrays import Array, Arrays, ByName, Residuals, namespace
from precondattn.frame import Frame


@dataclass(frozen=True)
class EluPlusOne(TokenWise):
    """elu(x) + 1, element by element.

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), Eq. 7.

    Examples
    --------
    >>> import numpy as np
    >>> EluPlusOne()(np.asarray([-1.0, 0.0, 2.0]).reshape(1, 1, 1, 3)).ravel().round(3)
    array([0.368, 1.   , 3.   ])
    """

    name: ClassVar[str] = "elu_plus_one"

    inputs = Inputs(x="b t h d")
    output = "b t h d"

    def forward(self, x: ByName, frame: Frame) -> tuple[Array, Residuals]:
        xp, a = namespace(x["x"]), x["x"]
        # Without the inner `where`, exp would overflow for large a, and its gradient be NaN.
        return xp.where(a > 0, a + 1.0, xp.exp(xp.where(a > 0, 0.0, a))), ()

    def backward(
        self, x: ByName, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        return {"x": cotangent * namespace(out).where(x["x"] > 0, 1.0, out)}
