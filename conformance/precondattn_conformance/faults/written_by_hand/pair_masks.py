"""Faults of masks of pairs: the attn_mask or prefix of other tokens, heads or sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from precondattn.arrays import Array
from precondattn.frame import Frame
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    STEP,
    Change,
    Fault,
    Function,
    MethodCall,
    inside,
    with_call,
)
from precondattn_conformance.faults.written_by_hand.written import blocked, written
from precondattn_portable.masks import Mask

BOTH = (FORWARD, BACKWARD)
ALL = (*BOTH, STEP)


def faults() -> list[Fault]:
    """All faults in this file."""
    return [
        written(
            "softmax",
            ALL,
            "an attn_mask in place of causality",
            inside(Frame, "visible", _instead),
        ),
        written("softmax", ALL, "a prefix without its last token", _prefix(lambda p: p - 1)),
        written("softmax", BOTH, "a prefix of one token more", _prefix(lambda p: p + 1)),
        written("softmax", ALL, "the prefix of another sequence", _prefix(_of_next)),
        written("softmax", BOTH, "a prefix of the row, not of its segment", with_call(_of_row)),
        written("softmax", BACKWARD, "no prefix in the gradient", _prefix(np.zeros_like)),
        written("softmax", ALL, "the attn_mask of the first head for all", _pairs(_of_first_head)),
        written("softmax", ALL, "the heads of an attn_mask by key head last", _pairs(_interleaved)),
        written("softmax", ALL, "the attn_mask of another sequence", _pairs(_of_next)),
        written("softmax", STEP, "the attn_mask of new keys only", with_call(_of_new_keys)),
        written("softmax", STEP, "an attn_mask by slots before the first", with_call(_late_slots)),
        blocked(
            "softmax",
            (*BOTH, STEP),
            "the attn_mask of the first key heads for all",
            Mask,
            "of_part",
            lambda true: lambda self, part: true(self, (part[0], slice(0, 1), ...)),
        ),
        blocked(
            "softmax[window=3]",
            BOTH,
            "the last key of a prefix left out where a window begins after it",
            Mask,
            "between",
            _from_last_of_prefix,
        ),
    ]


def _prefix(change: Callable[[np.ndarray], np.ndarray]) -> Change:
    return _changed("q_prefix", change)


def _pairs(change: Callable[[np.ndarray], np.ndarray]) -> Change:
    return _changed("pairs", change)


def _changed(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    """Calls whose frame has this array changed, where it has one."""

    def other(call: MethodCall) -> MethodCall:
        array = getattr(call.frame, name)
        if array is None:
            return call
        return replace(call, frame=call.frame.replaced(**{name: change(np.asarray(array))}))

    return with_call(other)


def _instead(true: Function) -> Function:
    def visible(frame: Frame, *, causal: bool, **options: object) -> Array:
        return true(frame, causal=causal and frame.pairs is None, **options)

    return visible


def _of_next(of_sequences: np.ndarray) -> np.ndarray:
    return np.roll(of_sequences, 1, axis=0)


def _of_row(call: MethodCall) -> MethodCall:
    """Every segment uses the prefix length of the first segment in its row."""
    frame = call.frame
    if frame.q_prefix is None or frame.k_segment is None:
        return call
    first = np.broadcast_to(np.asarray(frame.q_prefix)[:, :1], frame.q_prefix.shape)
    return replace(call, frame=frame.replaced(q_prefix=first))


def _of_first_head(pairs: np.ndarray) -> np.ndarray:
    return pairs[:, :1]


def _interleaved(pairs: np.ndarray) -> np.ndarray:
    """Query head i reads the mask of the i-th head in the other order of grouping."""
    b, h, t, s = pairs.shape
    if h % 2:
        return pairs
    return pairs.reshape(b, 2, h // 2, t, s).swapaxes(1, 2).reshape(pairs.shape)


def _of_new_keys(call: MethodCall) -> MethodCall:
    frame = call.frame
    if frame.pairs is None:
        return call
    pairs = np.array(frame.pairs)
    pairs[..., : pairs.shape[3] - frame.q_position.shape[1]] = True
    return replace(call, frame=frame.replaced(pairs=pairs))


def _late_slots(call: MethodCall) -> MethodCall:
    """The columns for cache slots are moved by one."""
    frame = call.frame
    if frame.pairs is None:
        return call
    pairs = np.array(frame.pairs)
    slots = pairs.shape[3] - frame.q_position.shape[1]
    pairs[..., :slots] = np.roll(pairs[..., :slots], 1, axis=3)
    return replace(call, frame=frame.replaced(pairs=pairs))


def _from_last_of_prefix(true: Function) -> Function:
    def between(self: Mask, i0: int, i1: int) -> tuple[int, int]:
        start, stop = true(self, i0, i1)
        return (start - 1, stop) if start < stop and start > 0 else (start, stop)

    return between
