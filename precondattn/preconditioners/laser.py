"""LASER: attention to the exponentials of the values (`spec/laser.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from precondattn.algebra import Mechanism, Offers, Preconditioner, Step, step
from precondattn.spec.laser import LOG_MEAN_EXP
from precondattn.spec.softmax import Softmax


@dataclass(frozen=True)
class Laser(Preconditioner):
    """LASER: o = log(A eᵛ) in place of o = A v, with elementwise exponential and logarithm.

    Source: LASER (arXiv 2411.03493), Eq. 6–9.

    Parameters
    ----------
    base : Mechanism
        A base whose output is a mean of the values, with non-negative weights that sum to 1.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.normal(size=(3, 2, 6, 4, 8))
    >>> bool(np.all(pa.Laser()(q, k, v) >= pa.Softmax()(q, k, v) - 1e-12))
    True
    """

    name: ClassVar[str] = "laser"
    variants: ClassVar[tuple[str, ...]] = (
        "laser(softmax[causal=false])",
        "laser(softmax[window=3])",
        "laser(softmax[bias=true])",
    )

    base: Mechanism = Softmax()

    @cached_property
    def offers(self) -> Offers:
        return self.base.offers._replace(read=None)

    def refuses(self) -> str | None:
        if self.base.offers.row_axis == "channel":
            return "the base takes means over channels, and laser needs one over tokens"
        if self.base.offers.read != "mean":
            return (
                "laser needs a base that reads a mean of its values, under non-negative weights "
                "that sum to one"
            )
        return None

    def steps(self) -> tuple[Step, ...]:
        return (step("out", self.base.with_read(LOG_MEAN_EXP)),)
