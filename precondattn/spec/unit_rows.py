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

from precondattn.algebra.declaration import Inputs
from precondattn.algebra.mechanism import Offers, TokenWise
from precondattn.algebra.options import choice, flag, non_negative
from precondattn.arrays import Array, Arrays, Residuals, namespace, stop_gradient, zero_where_not
from precondattn.frame import Frame


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

    def _along_rows(self, x: Array, frame: Frame, reduce: str) -> Array:
        """The "sum" or "max" of each row's entries, at every place of it (or on an axis of 1)."""
        xp = namespace(x)
        if self.axis == "token":
            return getattr(xp, reduce)(x, axis=-1, keepdims=True)
        if frame.q_valid is not None:
            x = zero_where_not(frame.q_valid[:, :, None, None], x)
        if frame.q_segment is None:
            return getattr(xp, reduce)(x, axis=1, keepdims=True)
        same = frame.q_segment[:, :, None] == frame.q_segment[:, None, :]
        each = zero_where_not(same[:, :, :, None, None], x[:, None, :, :, :])
        return getattr(xp, reduce)(each, axis=2)

    def _divisors(self, o: Array, frame: Frame) -> tuple[Array, Array, Array]:
        """Two numbers whose product is max(‖o‖, ε), and whether that is ‖o‖.

        A row is brought to size 1 before it is squared, so that nothing overflows or vanishes.
        """
        xp = namespace(o)
        size = stop_gradient(self._along_rows(xp.abs(o), frame, "max"))
        some = size > 0
        size = xp.where(some, size, 1.0)
        square = self._along_rows((o / size) ** 2, frame, "sum")
        # The root of a zero row has no derivative, not even one to be multiplied by 0.
        root = xp.sqrt(xp.where(some, square, 1.0))
        longer = some & (size > self.eps / root)
        return xp.where(longer, size, self.eps or 1.0), xp.where(longer, root, 1.0), longer

    def forward(self, x: Mapping[str, Array], frame: Frame) -> tuple[Array, Residuals]:
        size, root, _ = self._divisors(x["o"], frame)
        return x["o"] / size / (stop_gradient(root) if self.detach else root), ()

    def backward(
        self,
        x: Mapping[str, Array],
        frame: Frame,
        out: Array,
        residuals: Residuals,
        cotangent: Array,
    ) -> Arrays:
        size, root, longer = self._divisors(x["o"], frame)
        if not self.detach:
            along = self._along_rows(out * cotangent, frame, "sum")
            cotangent = cotangent - out * zero_where_not(longer, along)
        return {"o": cotangent / root / size}
