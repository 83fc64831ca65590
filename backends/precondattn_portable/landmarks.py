"""Means of segments of tokens: x̃ = M x, and x += Mᵀ x̃ for the gradient.

Where all tokens count and m divides their number, segments are an axis. Elsewhere M is a matrix,
(b or 1, 1, m, tokens).
"""

from __future__ import annotations

from precondattn.arrays import Array, namespace
from precondattn.spec.array_functions import transpose
from precondattn.spec.segment_means import segment_means
from precondattn_portable.arithmetic import Arithmetic


class Landmarks:
    """The means of m segments of rows like x (b, h, tokens, d)."""

    def __init__(
        self, ops: Arithmetic, m: int, x: Array, members: Array | None, counted: Array | None
    ) -> None:
        self.ops, self.m = ops, m
        self.each = x.shape[2] // m
        """Tokens of a segment"""
        is_whole = members is None and counted is None and not x.shape[2] % m
        self.means = None if is_whole else segment_means(m, x, members, counted)

    @property
    def is_any(self) -> Array | None:
        """Which landmarks there are (b or 1, m); None where all are."""
        return None if self.means is None else self.means.is_any

    def means_of(self, x: Array) -> Array:
        """x̃ (b, h, m, d)"""
        if self.means is not None:
            return self.ops.product(self.means.matrix, x)
        xp, (b, h, _, d) = namespace(x), x.shape
        return xp.mean(xp.reshape(x, (b, h, self.m, self.each, d)), axis=3)

    def add_gradient(self, d_x: Array, d_mean: Array) -> Array:
        """dx + Mᵀ dx̃, in dx where the library can."""
        if self.means is not None:
            return self.ops.add(d_x, self.ops.product(transpose(self.means.matrix), d_mean))
        xp = namespace(d_x)
        segments = xp.reshape(d_x, (*d_x.shape[:2], self.m, self.each, d_x.shape[3]))
        total = self.ops.add(segments, d_mean[:, :, :, None, :] / self.each)
        return xp.reshape(total, d_x.shape)
