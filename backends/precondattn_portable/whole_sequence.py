"""Leaves that sum over all tokens of a sequence, computed for one packed segment after another.

    o = Σ_g [g] ∘ attend([g] ∘ x),    dx = Σ_g [g] ∘ attend_vjp([g] ∘ x, [g] ∘ do)

where [g] is 1 at the tokens of segment g, else 0. The definition computes all segments at once,
which takes as many times the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.arrays import Array, Arrays, Residuals, has_only_a_shape, namespace
from precondattn.frame import Frame
from precondattn.spec.whole_sequence import segment_numbers
from precondattn_portable.algorithm import Algorithm
from precondattn_portable.layout import only_at, zero_padding

W = TypeVar("W", bound=LeafProtocol)


class WholeSequenceAlgorithm(Algorithm[W]):
    """Algorithm of a `WholeSequence`: output and gradients of sequences that are not packed.

    Both read only the frame's validity, and may return anything for masked tokens.
    """

    def attend(self, x: Arrays, frame: Frame) -> Array:
        raise NotImplementedError

    def attend_vjp(self, x: Arrays, frame: Frame, cotangent: Array) -> Arrays:
        raise NotImplementedError

    def forward(self, x: Arrays, frame: Frame) -> tuple[Array, Residuals]:
        def one(part: _Segment) -> Arrays:
            return {"out": part.only(self.attend(part.inputs(x), part.frame))}

        return zero_padding(self._summed(frame, one)["out"], frame), ()

    def backward(
        self, x: Arrays, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        cotangent = zero_padding(cotangent, frame)

        def one(part: _Segment) -> Arrays:
            return part.inputs(self.attend_vjp(part.inputs(x), part.frame, part.only(cotangent)))

        return self._summed(frame, one)

    def _summed(self, frame: Frame, one: Callable[[_Segment], Arrays]) -> Arrays:
        if frame.k_segment is None:
            return one(_Segment(self.leaf, frame, None))
        number = segment_numbers(frame.k_segment)
        count = 1 if has_only_a_shape(number) else namespace(number).max(number) + 1
        return self.ops.summed(count, lambda i: one(_Segment(self.leaf, frame, number == i)))


class _Segment:
    """The tokens of one segment of each sequence (b, t); all tokens where `members` is None."""

    def __init__(self, leaf: LeafProtocol, frame: Frame, members: Array | None) -> None:
        self.leaf, self.frame, self.members = leaf, frame, members
        if members is not None:
            both = frame.q_valid, frame.k_valid
            q_valid, k_valid = (members if a is None else members & a for a in both)
            self.frame = frame.replaced(q_valid=q_valid, k_valid=k_valid)

    def only(self, x: Array) -> Array:
        """x (b, t, …), set to 0 at tokens outside the segment."""
        return only_at(self.members, x)

    def inputs(self, x: Arrays) -> Arrays:
        """The inputs, set to 0 at tokens outside the segment."""
        specs = self.leaf.inputs
        return {n: a if specs[n].time_axis is None else self.only(a) for n, a in x.items()}
