"""Per-dimension scale: a learnt scale for each dimension of the query (`spec/scaled_dims.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Mechanism, Preconditioner, Step, options, step
from precondattn.spec.scaled_dims import ScaledDims
from precondattn.spec.softmax import Softmax


@dataclass(frozen=True)
class PerDimScale(Preconditioner):
    """A learnt scale per query dimension: o = base(q ∘ softplus(p) / ln 2, k, v).

    p is an input `per_dim` (d).

    Source: LASER (arXiv 2411.03493) 4.1.

    Parameters
    ----------
    base : Mechanism
        Any base that does not normalise its queries afterwards.
    normalize : bool
        Whether softplus(p) is divided by ln 2, so that p = 0 changes nothing. LASER's paper does
        not divide.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 4))
    >>> bool(np.allclose(pa.PerDimScale()(q, k, v, per_dim=np.zeros(4)), pa.Softmax()(q, k, v)))
    True
    """

    name: ClassVar[str] = "per_dim_scale"
    variants: ClassVar[tuple[str, ...]] = ("per_dim_scale[normalize=false]",)

    base: Mechanism = Softmax()
    normalize: bool = options.flag(True)

    def refuses(self) -> str | None:
        return self._refuses_second_map() or self._refuses_lost_length()

    def steps(self) -> tuple[Step, ...]:
        scaled = ScaledDims(self.normalize)
        return (step("q_scaled", scaled), step("out", self.base, q="q_scaled"))
