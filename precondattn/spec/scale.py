"""The scale of scores, s ⟨q, k⟩: d^{−1/2} for vectors of width d, unless another is given."""

from __future__ import annotations


class ScaledScores:
    """A leaf with the option `scale`."""

    scale: float | None

    def scale_for(self, d: int) -> float:
        return d**-0.5 if self.scale is None else self.scale
