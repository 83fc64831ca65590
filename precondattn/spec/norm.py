"""The base class of the norms: normalised rows, optionally multiplied by a gain.

y = γ ∘ N(x),    dx = vjp of N at γ ∘ dy,    dγ = Σ dy ∘ N(x)
"""

from __future__ import annotations

from dataclasses import dataclass

from precondattn.algebra import Inputs, TokenWise, options
from precondattn.arrays import Array, Arrays, ByName, Residuals
from precondattn.frame import Frame
from precondattn.spec.array_functions import sum_rows


@dataclass(frozen=True)
class RowNorm(TokenWise):
    """A norm N of rows; subclasses define `normalized` and `normalized_vjp`."""

    eps: float = options.non_negative(1e-6)
    gain: bool = options.flag(False)

    output = "b t h d"

    @property
    def inputs(self) -> Inputs:
        return Inputs(x="b t h d", gain="d") if self.gain else Inputs(x="b t h d")

    def normalized(self, x: Array) -> Array:
        """N(x)."""
        raise NotImplementedError

    def normalized_vjp(self, x: Array, cotangent: Array) -> Array:
        """The gradient of x."""
        raise NotImplementedError

    def forward(self, x: ByName, frame: Frame) -> tuple[Array, Residuals]:
        normalized = self.normalized(x["x"])
        return (normalized * _row(x["gain"]) if self.gain else normalized), ()

    def backward(
        self, x: ByName, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        if not self.gain:
            return {"x": self.normalized_vjp(x["x"], cotangent)}
        return {
            "x": self.normalized_vjp(x["x"], cotangent * _row(x["gain"])),
            "gain": sum_rows(cotangent * self.normalized(x["x"])),
        }


def _row(gain: Array) -> Array:
    """γ (d) beside rows (b, t, h, d)."""
    return gain[None, None, None, :]
