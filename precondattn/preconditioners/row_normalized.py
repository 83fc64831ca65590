"""Row-normalised ("preconditioned") attention: output rows of length 1 (`spec/unit_rows.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from precondattn.algebra import Mechanism, Offers, Preconditioner, Step, options, step
from precondattn.spec.softmax import Softmax
from precondattn.spec.unit_rows import UnitRows


@dataclass(frozen=True)
class RowNormalized(Preconditioner):
    """Rows of length 1: y = o / max(‖o‖, ε), with o = base(q, k, v), for each row and head.

    Source: Preconditioned Attention, Eq. 8–20 and Algorithm 1.

    Parameters
    ----------
    base : Mechanism
        Any base whose rows do not already have length 1.
    eps : float
        The lower bound ε of the divisor.
    detach : bool
        Whether the gradient treats the norm as a constant, as in the paper. It then differs from
        finite differences; with `detach=False` it agrees with them.
    axis : {"auto", "token", "channel"}
        What a row is: the output of a token, or a channel of the output over all tokens, which
        requires a base that is not causal. "auto" means the rows of the base's attention matrix.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 4))
    >>> np.linalg.vector_norm(pa.RowNormalized()(q, k, v), axis=-1).round(12).min()
    np.float64(1.0)
    """

    name: ClassVar[str] = "row_normalized"
    variants: ClassVar[tuple[str, ...]] = (
        "row_normalized[detach=false]",
        "row_normalized[eps=0]",
        "row_normalized(softmax[causal=false])",
        "row_normalized[axis=channel](softmax[causal=false])",
        "row_normalized[detach=false,axis=channel](softmax[causal=false])",
    )

    base: Mechanism = Softmax()
    eps: float = options.non_negative(1e-6)
    detach: bool = options.flag(True)
    axis: str = options.choice("auto", "token", "channel")

    @cached_property
    def offers(self) -> Offers:
        return self.base.offers._replace(read=None, unit_rows=True)

    @property
    def _axis(self) -> str:
        return self.base.offers.row_axis if self.axis == "auto" else self.axis

    def refuses(self) -> str | None:
        if self.base.offers.unit_rows:
            return "the base's rows have length 1 already"
        if self._axis == "channel" and self.base.offers.causal:
            return "the norm of a channel runs over all tokens, and the base is causal"
        if self.base.offers.read == "mean_and_log_sum":
            return "the last channel of the base's output is a logarithm, not a part of the row"
        if self._axis == "token" and self.base.offers.sink:
            return "the base's sink scales every row of its output, and the norm divides that out"
        return None

    def steps(self) -> tuple[Step, ...]:
        return (step("o", self.base), step("out", UnitRows(self.eps, self.detach, self._axis)))
