"""Rows of length 1: the piece of row-normalised ("preconditioned") attention.

    y_i = C_i o_i,    C_i = 1 / max(‖o_i‖, ε)

Source: Preconditioned Attention, Eq. 8–11 and Algorithm 1. Since C(Av) = (CA)v, this is attention
whose matrix has its rows rescaled; the denominator of a softmax cancels.

C is not differentiated, as in Algorithm 1: do = C dy. With `detach=False` it is,

    do = C (dy − y (y·dy)),

and only that agrees with finite differences. Rows of length ε or less are multiplied by 1/ε in both
(0 stays 0); with ε = 0 the zero row is unchanged (C := 1).

`axis="channel"` normalises the rows of the d × d attention of XCiT: one norm per channel, over all
tokens of a sequence (or packed segment), and so not causal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Inputs, Offers, TokenWise, options
from precondattn.arrays import namespace, stop_gradient, zero_where_not
from precondattn.frame import Frame
from precondattn.frameworks.types import Array, Arrays, ByName, Residuals


@dataclass(frozen=True)
class UnitRows(TokenWise):
    """o / max(‖o‖, eps), with a norm that is by default constant for the gradient.

    Source: Preconditioned Attention, Eq. 8–11, Algorithm 1.

    Parameters
    ----------
    eps : float
        The lower bound of the divisor. Below the smallest normal number of the dtype it counts as
        0, since 1/ε would be infinite.
    detach : bool
        Whether the norm is constant for the gradient.
    axis : {"token", "channel"}
        Whether a row is the output of a token, or that of a channel over all tokens.

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
    eps: float = options.non_negative(1e-6)
    detach: bool = options.flag(True)
    axis: str = options.choice("token", "channel")

    inputs = Inputs(o="b t h e")
    output = "b t h e"

    @property
    def offers(self) -> Offers:
        return Offers(causal=self.axis == "token", row_axis=self.axis)

    def refuses_mask(self, name: str) -> str | None:
        if self.axis == "channel":
            return f"{self.name}'s norm of a channel is over all tokens of a sequence"
        return super().refuses_mask(name)

    def _along_rows(self, x: Array, frame: Frame, reduce: str) -> Array:
        """The "sum" or "max" of each row's entries, in a shape that broadcasts against x."""
        xp = namespace(x)
        if self.axis == "token":
            return getattr(xp, reduce)(x, axis=-1, keepdims=True)
        if frame.q_valid is not None:
            x = zero_where_not(frame.q_valid[:, :, None, None], x)
        if frame.q_segment is None:
            return getattr(xp, reduce)(x, axis=1, keepdims=True)
        same_segment = frame.q_segment[:, :, None] == frame.q_segment[:, None, :]
        segments = zero_where_not(same_segment[:, :, :, None, None], x[:, None, :, :, :])
        return getattr(xp, reduce)(segments, axis=2)

    def eps_above(self, smallest_normal: float) -> float:
        """ε, or 0 if it is below the smallest normal number of the dtype of the computation."""
        return self.eps if self.eps >= smallest_normal else 0.0

    def _divisors(self, o: Array, frame: Frame) -> tuple[Array, Array, Array]:
        """Two numbers whose product is max(‖o‖, ε), and whether that is ‖o‖."""
        xp = namespace(o)
        eps = self.eps_above(float(xp.finfo(o.dtype).smallest_normal))
        size = stop_gradient(self._along_rows(xp.abs(o), frame, "max"))
        is_nonzero = size > 0
        size = xp.where(is_nonzero, size, 1.0)
        square = self._along_rows((o / size) ** 2, frame, "sum")
        # The root's derivative at 0 is infinite, and would give NaN even if multiplied by 0.
        root = xp.sqrt(xp.where(is_nonzero, square, 1.0))
        is_longer = is_nonzero & (size > eps / root)
        return xp.where(is_longer, size, eps or 1.0), xp.where(is_longer, root, 1.0), is_longer

    def forward(self, x: ByName, frame: Frame) -> tuple[Array, Residuals]:
        size, root, _ = self._divisors(x["o"], frame)
        return x["o"] / size / (stop_gradient(root) if self.detach else root), ()

    def backward(
        self, x: ByName, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        size, root, is_longer = self._divisors(x["o"], frame)
        if not self.detach:
            inner = self._along_rows(out * cotangent, frame, "sum")
            cotangent = cotangent - out * zero_where_not(is_longer, inner)
        return {"o": cotangent / root / size}
