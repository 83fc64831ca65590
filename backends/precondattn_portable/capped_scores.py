"""Row blocks of soft-capped scores (`spec/soft_cap.py`), around those of a metric.

    S ← c tanh(S / c),    dS ← dS ∘ (1 − tanh²(S / c))

The slope is kept from a row block to its gradient, which follows it.
"""

from __future__ import annotations

from precondattn.arrays import Array
from precondattn.spec.soft_cap import slope
from precondattn_portable.arithmetic import Arithmetic, Scratch
from precondattn_portable.scores import Scores


def capped_in_place(ops: Arithmetic, scores: Array, cap: float) -> Array:
    """c tanh(S / c), in `scores` where the library can."""
    return ops.multiply(ops.tanh(ops.multiply(scores, 1.0 / cap)), cap)


class CappedScores:
    """The scores of a metric, capped."""

    def __init__(
        self, ops: Arithmetic, scores: Scores, cap: float, *, gradient: bool = False
    ) -> None:
        self.ops, self.scores, self.cap, self.gradient = ops, scores, cap, gradient

    @property
    def d_q(self) -> Array:
        return self.scores.d_q

    @property
    def d_k(self) -> Array:
        return self.scores.d_k

    def row_block(self, i0: int, i1: int, low: int, high: int, workspace: Scratch) -> Array:
        scores = self.scores.row_block(i0, i1, low, high, workspace)
        if self.gradient:
            self.slope = slope(scores, self.cap)
        return capped_in_place(self.ops, scores, self.cap)

    def pull(self, i0: int, i1: int, low: int, high: int, d_row_block: Array) -> None:
        d_row_block = self.ops.multiply(self.slope, d_row_block)
        self.scores.pull(i0, i1, low, high, d_row_block)
