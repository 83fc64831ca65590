"""The tokens of every sequence in reversed order: the piece by which a recurrence runs backwards.

    y = reversed x,    dx = reversed dy

as in `precondattn/reversed_order.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Flops, Inputs, Leaf, Offers, options
from precondattn.arrays import Array, Arrays, ByName, Residuals
from precondattn.frame import Frame
from precondattn.reversed_order import reversed_tokens


@dataclass(frozen=True)
class ReversedTokens(Leaf):
    """x with the tokens of each sequence, or packed segment, in reversed order.

    Parameters
    ----------
    channels : bool
        Whether x has an axis of channels: (b, t, h, d), or (b, t, h).

    Examples
    --------
    >>> import numpy as np
    >>> x = np.arange(5.0).reshape(1, 5, 1, 1)
    >>> ReversedTokens()(x, lengths=[4]).ravel()
    array([3., 2., 1., 0., 0.])
    >>> ReversedTokens()(x, segment_ids=np.asarray([[0, 0, 1, 1, 1]])).ravel()
    array([1., 0., 4., 3., 2.])
    """

    name: ClassVar[str] = "reversed_tokens"
    role: ClassVar[str] = "piece"
    variants: ClassVar[tuple[str, ...]] = ("reversed_tokens[channels=false]",)
    channels: bool = options.flag(True)

    @property
    def inputs(self) -> Inputs:
        return Inputs(x=self.output)

    @property
    def output(self) -> str:  # type: ignore[override]
        return "b t h d" if self.channels else "b t h"

    offers = Offers(causal=False)
    reads_all_queries = True
    reverses_tokens = True

    def flops(self, sizes: Mapping[str, int]) -> Flops:
        return Flops(0.0, 0.0, 0.0)

    def forward(self, x: ByName, frame: Frame) -> tuple[Array, Residuals]:
        return reversed_tokens(x["x"], frame), ()

    def backward(
        self, x: ByName, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        return {"x": reversed_tokens(cotangent, frame)}
