"""Rows of length 1: the piece of row-normalised ("preconditioned") attention.

    y_i = C_i o_i,    C_i = 1 / max(‖o_i‖, ε)

Source: Preconditioned Attention, Eq. 8–11 and Algorithm 1. Since C(Av) = (CA)v, this is attention
whose matrix has its rows rescaled; the denominator of a softmax cancels.

C is not differentiated, as in Algorithm 1: do = C dy. With `detach=False` it is,

    do = C (dy − y (y·dy)),

and only that agrees with finite differences. Rows no longer than ε are multiplied by 1/ε in both
(0 stays 0); with ε = 0 the zero row is left alone (C := 1).

`axis="channel"` makes the rows of the d × d attention of XCiT: one norm for each channel, over the
tokens of a sequence (of a packed segment), which looks into the future.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from precondattn.arrays import Array, cast, namespace, stop_gradient, zero_where_not
from precondattn.declaration import Inputs
from precondattn.frame import Frame
from precondattn.mechanism import Arrays, Offers, Residuals, TokenWise
from precondattn.options import choice, flag, non_negative


@dataclass(frozen=True)
class UnitRows(TokenWise):
    """o / max(‖o‖, eps), the norm constant to the gradient unless told otherwise.

    Parameters
    ----------
    eps : float
        The length that shorter rows are taken to have.
    detach : bool
        Whether the norm is constant to the gradient.
    axis : {"token", "channel"}
        Whether a row is a token's output, or a channel's over all tokens.

    Source
    ------
    Preconditioned Attention, Eq. 8–11, Algorithm 1.

    Examples
    --------
    >>> import numpy as np
    >>> UnitRows()(np.asarray([3.0, 4.0]).reshape(1, 1, 1, 2)).ravel()
    array([0.6, 0.8])
    """

    name: ClassVar[str] = "unit_rows"
    variants: ClassVar[tuple[str, ...]] = (
        "unit_rows[detach=false]",
        "unit_rows[axis=channel]",
        "unit_rows[axis=channel,detach=false]",
    )
    eps: float = non_negative(1e-6)
    detach: bool = flag(True)
    axis: str = choice("token", "channel")

    inputs = Inputs(o="b t h e")
    output = "b t h e"

    @property
    def offers(self) -> Offers:
        return Offers(causal=self.axis == "token", row_axis=self.axis)

    def _row_sum(self, x: Array, frame: Frame) -> Array:
        """The sum over each row, at every place of it (or with an axis of 1)."""
        xp = namespace(x)
        if self.axis == "token":
            return xp.sum(x, axis=-1, keepdims=True)
        if frame.q_valid is not None:
            x = zero_where_not(frame.q_valid[:, :, None, None], x)
        if frame.q_segment is None:
            return xp.sum(x, axis=1, keepdims=True)
        same = cast(frame.q_segment[:, :, None] == frame.q_segment[:, None, :], x.dtype)
        return xp.reshape(same @ xp.reshape(x, (*x.shape[:2], -1)), x.shape)

    def _factor(self, o: Array, frame: Frame) -> tuple[Array, Array]:
        """C, and where it is 1/‖o‖ (and not 1/ε)."""
        xp = namespace(o)
        # Brought to size 1 before they are squared, rows neither overflow nor vanish.
        size = xp.max(xp.abs(o), axis=-1 if self.axis == "token" else 1, keepdims=True)
        size = stop_gradient(xp.where(size > 0, size, 1.0))
        square = self._row_sum((o / size) ** 2, frame)
        # The root of a zero row has no derivative, not even one to be multiplied by 0.
        norm = size * xp.sqrt(xp.where(square > 0, square, 1.0))
        longer = (square > 0) & (norm > self.eps)
        return 1 / xp.where(longer, norm, self.eps or 1.0), longer

    def forward(self, x: Mapping[str, Array], frame: Frame) -> tuple[Array, Residuals]:
        factor, _ = self._factor(x["o"], frame)
        return x["o"] * (stop_gradient(factor) if self.detach else factor), ()

    def backward(
        self,
        x: Mapping[str, Array],
        frame: Frame,
        out: Array,
        residuals: Residuals,
        cotangent: Array,
    ) -> Arrays:
        factor, longer = self._factor(x["o"], frame)
        if self.detach:
            return {"o": factor * cotangent}
        along = zero_where_not(longer, self._row_sum(out * cotangent, frame))
        return {"o": factor * (cotangent - out * along)}
