"""Leaves that sum over all tokens of a sequence: packed segments, one after another.

    o = Σ_g [g] ∘ attend([g] ∘ x),    dx = Σ_g [g] ∘ attend_vjp([g] ∘ x, [g] ∘ do)

The definition computes the segments side by side, which takes as many times the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.arrays import Array, Arrays, Residuals, namespace, zero_where_not
from precondattn.frame import Frame
from precondattn.spec.whole_sequence import segment_numbers
from precondattn_portable.algorithm import Algorithm
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.layout import zero_padding

W = TypeVar("W", bound=LeafProtocol)


class WholeSequenceAlgorithm(Algorithm[W]):
    """Algorithm of a `WholeSequence`: `attend` and `attend_vjp` of sequences that are not packed.

    Both are given the frame's validity, and may return anything for masked tokens.
    """

    def attend(self, x: Arrays, q_valid: Array | None, k_valid: Array | None) -> Array:
        """The output."""
        raise NotImplementedError

    def attend_vjp(
        self, x: Arrays, q_valid: Array | None, k_valid: Array | None, cotangent: Array
    ) -> Arrays:
        """The gradient of every input."""
        raise NotImplementedError

    def forward(self, x: Arrays, frame: Frame) -> tuple[Array, Residuals]:
        if frame.k_segment is None:
            out = self.attend(x, frame.q_valid, frame.k_valid)
            return zero_padding(out, frame), ()

        def one(part: _Segment) -> Arrays:
            out = self.attend(part.inputs(self.leaf, x), *part.valid(frame))
            return {"out": part.only(out)}

        return zero_padding(_summed(self.ops, frame.k_segment, one)["out"], frame), ()

    def backward(
        self, x: Arrays, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        cotangent = zero_padding(cotangent, frame)
        if frame.k_segment is None:
            return self.attend_vjp(x, frame.q_valid, frame.k_valid, cotangent)

        def one(part: _Segment) -> Arrays:
            gradients = self.attend_vjp(
                part.inputs(self.leaf, x), *part.valid(frame), part.only(cotangent)
            )
            return part.inputs(self.leaf, gradients)

        return _summed(self.ops, frame.k_segment, one)


class _Segment:
    """The tokens of one segment of each sequence."""

    def __init__(self, members: Array) -> None:
        self.members = members
        """(b, t)"""

    def only(self, x: Array) -> Array:
        """x (b, t, …), 0 at other tokens."""
        shape = (*self.members.shape, *(1,) * (x.ndim - 2))
        return zero_where_not(namespace(x).reshape(self.members, shape), x)

    def inputs(self, leaf: LeafProtocol, x: Mapping[str, Array]) -> Arrays:
        """The inputs, 0 at other tokens."""
        has_tokens = {name: leaf.inputs[name].time_axis is not None for name in x}
        return {name: self.only(a) if has_tokens[name] else a for name, a in x.items()}

    def valid(self, frame: Frame) -> tuple[Array, Array]:
        """Which queries and keys are of the segment and valid."""
        q, k = (
            self.members if valid is None else self.members & valid
            for valid in (frame.q_valid, frame.k_valid)
        )
        return q, k


def _summed(ops: Arithmetic, ids: Array, one: Callable[[_Segment], Arrays]) -> Arrays:
    """The sum over all segments."""
    number = segment_numbers(ids)
    count = namespace(number).max(number) + 1
    return ops.summed(count, lambda i: one(_Segment(number == i)))
