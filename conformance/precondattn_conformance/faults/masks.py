"""Faults of masks: segments and validity are not read, or read at the wrong place.

    visible(i, j)  ≠  j ≤ i,  same segment,  j valid

The backend gets a changed frame.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from precondattn.algebra.piece import Piece
from precondattn.arrays import Array, namespace
from precondattn.frame import Frame
from precondattn_conformance.faults.applicable import (
    Named,
    depends_on_validity,
    looks_at_other_tokens,
)
from precondattn_conformance.faults.fault import STEP, STEP_BACKWARD, Change, MethodCall, with_call


def _in_frame(change: Callable[[Frame], Frame]) -> Change:
    return with_call(lambda call: replace(call, frame=change(call.frame)))


def segments(m: Piece, stage: str) -> Named:
    """Wrong segment boundaries; not for steps, since a cache contains one segment."""
    if stage in (STEP, STEP_BACKWARD) or not looks_at_other_tokens(m):
        return
    ignored = {"q_segment": None, "k_segment": None}
    yield "ignored", _in_frame(lambda frame: frame.replaced(**ignored))
    yield "each begins one token late", _in_frame(_later_segments)
    yield "those of an earlier call of the same shapes", _of_earlier_call()


def _of_earlier_call() -> Change:
    """A mask that is computed once for all calls of one shape."""
    frames: dict[tuple[object, ...], Frame] = {}

    def other(call: MethodCall) -> MethodCall:
        shapes = tuple(tuple(x.shape) for x in call.inputs.values())
        return replace(call, frame=frames.setdefault(shapes, call.frame))

    return with_call(other)


def _later_segments(frame: Frame) -> Frame:
    if frame.k_segment is None:
        return frame
    later = _rolled(frame.k_segment, keep_first=True)
    t = frame.q_position.shape[1]
    return frame.replaced(k_segment=later, q_segment=later[:, later.shape[1] - t :])


def _rolled(x: Array, *, keep_first: bool) -> Array:
    """x moved by one token: every token gets the entry of the token before it."""
    before = x[:, :1] if keep_first else x[:, -1:]
    return namespace(x).concat([before, x[:, :-1]], axis=1)


def validity(m: Piece, stage: str) -> Named:
    """Wrong validity of keys, for mechanisms where `depends_on_validity`."""
    if not depends_on_validity(m):
        return
    yield "every key valid", _in_frame(_all_valid)
    yield "that of the key before", _in_frame(_late_validity)


def _all_valid(frame: Frame) -> Frame:
    if frame.k_valid is None:
        return frame
    return frame.replaced(k_valid=namespace(frame.k_valid).ones_like(frame.k_valid))


def _late_validity(frame: Frame) -> Frame:
    if frame.k_valid is None:
        return frame
    return frame.replaced(k_valid=_rolled(frame.k_valid, keep_first=False))


OPERATORS = {"segments": segments, "validity": validity}
