"""Faults of masks that are longer than a block, of two at once, and of long sequences.

A kernel reads keys in blocks. Whether a block is read, and where a mask begins in it, is decided
for the whole block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from precondattn.arrays import Array
from precondattn.frame import Frame
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    Change,
    Fault,
    Function,
    MethodCall,
    MethodResult,
    Truth,
    inside,
    with_call,
)
from precondattn_conformance.faults.written_by_hand.written import written

BOTH = (FORWARD, BACKWARD)


def faults() -> list[Fault]:
    """All faults in this file."""
    return [
        # Masks longer than a block.
        written("softmax", BOTH, "the key mask of the first 64 keys only", _in_keys(_first_block)),
        written("path", FORWARD, "the key mask of the first 32 keys only", _in_keys(_first_32)),
        written("laser", FORWARD, "no block before one that is masked", _on_softmax(_stopped)),
        written("softmax", FORWARD, "keys up to the first sequence's last block", _in_keys(_up_to)),
        written(
            "lucid_solve",
            BOTH,
            "segments compared within a block only",
            inside(Frame, "visible", _segments_within_blocks),
        ),
        written("gated_delta", FORWARD, "a segment cut after 32 tokens", with_call(_cut(32))),
        written("gla", BOTH, "a segment cut after 128 tokens", with_call(_cut(128))),
        # Two masks at once.
        written("softmax", FORWARD, "segments, and so no other mask", _in_keys(_or_segments)),
        written("lucid_solve", FORWARD, "lengths, and so no key mask", _in_keys(_or_lengths)),
        written("path", BACKWARD, "a key mask, and so no segments", with_call(_or_keys)),
        written("delta", FORWARD, "a key mask, and so no segments", with_call(_or_keys)),
        # Length.
        written("softmax", FORWARD, "a block in three bits", _in_keys(_in_three_bits)),
        written("linear", FORWARD, "a state of the last 1024 tokens", with_call(_restarted)),
        written("gated_delta", FORWARD, "no output of one token after whole blocks", _one_left),
        written("lucid_solve", FORWARD, "no output of one token after two blocks", _one_left),
        # Queries and keys.
        written("softmax", BOTH, "queries at most 16 keys after the first", with_call(_near)),
        written("path", FORWARD, "queries from the edge of a block on", with_call(_at_edge)),
    ]


def _in_keys(change: Callable[[np.ndarray, Frame], np.ndarray]) -> Change:
    """A change of the validity of keys (b, s), given the validity and the frame."""

    def other(call: MethodCall) -> MethodCall:
        frame = call.frame
        if frame.k_valid is None and change not in (_in_three_bits,):
            return call
        valid = np.ones(frame.k_position.shape, dtype=bool)
        valid = valid if frame.k_valid is None else np.array(frame.k_valid)
        return replace(call, frame=frame.replaced(k_valid=change(valid, frame)))

    return with_call(other)


def _on_softmax(change: Callable[[np.ndarray, Frame], np.ndarray]) -> Change:
    """A change of key validity within the softmax of a composition of several leaves."""

    def visible(true: Function) -> Function:
        def changed(frame: Frame, **options: object) -> Array:
            if frame.k_valid is not None:
                frame = frame.replaced(k_valid=change(np.array(frame.k_valid), frame))
            return true(frame, **options)

        return changed

    return inside(Frame, "visible", visible)


def _first_block(valid: np.ndarray, frame: Frame) -> np.ndarray:
    valid[:, 64:] = True
    return valid


def _first_32(valid: np.ndarray, frame: Frame) -> np.ndarray:
    valid[:, 32:] = True
    return valid


def _stopped(valid: np.ndarray, frame: Frame) -> np.ndarray:
    """A loop over blocks of 16 keys, from the last to the first, that stops at a masked block."""
    for row in valid:
        for start in range(0, len(row), 16):
            if not row[start : start + 16].any():
                row[:start] = False
    return valid


def _up_to(valid: np.ndarray, frame: Frame) -> np.ndarray:
    if frame.q_valid is None:
        return valid
    length = int(np.sum(frame.q_valid[0])) + frame.k_position.shape[1] - frame.q_position.shape[1]
    return np.asarray(valid & (np.arange(valid.shape[1]) < -(-length // 16) * 16))


def _segments_within_blocks(true: Function) -> Function:
    def visible(frame: Frame, **options: object) -> Array:
        mask = true(frame, **options)
        if frame.k_segment is None:
            return mask
        without = true(frame.replaced(k_segment=None), **options)
        query, key = frame.q_position[:, None, :, None], frame.k_position[:, None, None, :]
        return mask | (without & (query // 16 != key // 16))

    return visible


def _cut(after: int) -> Callable[[MethodCall], MethodCall]:
    """Segments longer than `after` tokens are cut into several of at most that length."""

    def segments(ids: np.ndarray) -> np.ndarray:
        begins = np.ones(ids.shape, dtype=bool)
        begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
        index = np.arange(ids.shape[1])
        start = np.maximum.accumulate(np.where(begins, index, 0), axis=1)
        return np.asarray(np.cumsum(begins, axis=1) * ids.shape[1] + (index - start) // after)

    def other(call: MethodCall) -> MethodCall:
        return _with_segments(call, segments)

    return other


def _with_segments(call: MethodCall, change: Callable[[np.ndarray], np.ndarray]) -> MethodCall:
    frame = call.frame
    if frame.k_segment is None:
        return call
    ids = change(np.asarray(frame.k_segment))
    t = frame.q_position.shape[1]
    changed = frame.replaced(k_segment=ids, q_segment=ids[:, ids.shape[1] - t :])
    return replace(call, frame=changed)


def _or_segments(valid: np.ndarray, frame: Frame) -> np.ndarray:
    return valid if frame.k_segment is None else valid | True


def _or_lengths(valid: np.ndarray, frame: Frame) -> np.ndarray:
    q_valid = frame.q_valid
    return valid if q_valid is None or q_valid.shape != valid.shape else np.array(q_valid)


def _or_keys(call: MethodCall) -> MethodCall:
    frame = call.frame
    if frame.k_valid is None or frame.k_valid.all():
        return call
    return replace(call, frame=frame.replaced(q_segment=None, k_segment=None))


def _in_three_bits(valid: np.ndarray, frame: Frame) -> np.ndarray:
    valid[:, 1024:] = False
    return valid


def _restarted(call: MethodCall) -> MethodCall:
    """Tokens from 1,024 on become a separate segment."""
    frame = call.frame
    position = np.broadcast_to(frame.k_position, (len(call.inputs["k"]), frame.k_position.shape[1]))
    past = 0 if frame.k_segment is None else 2 * np.asarray(frame.k_segment)
    ids = past + position // 1024
    return _with_segments(replace(call, frame=frame.replaced(k_segment=ids)), lambda given: given)


def _one_left(truth: Truth, call: MethodCall) -> MethodResult:
    """A last block of one row, after two blocks of at least 64 rows, is not written."""
    result = truth(call)
    tokens = result.out.shape[1]
    if tokens <= 64 or tokens % 64 != 1:
        return result
    out = np.array(result.out)
    out[:, -1] = 0
    return replace(result, out=out)


def _offset(call: MethodCall, change: Callable[[int], int]) -> MethodCall:
    frame = call.frame
    t, s = frame.q_position.shape[1], frame.k_position.shape[1]
    moved = frame.q_position - (s - t) + change(s - t)
    return replace(call, frame=frame.replaced(q_position=moved))


def _near(call: MethodCall) -> MethodCall:
    return _offset(call, lambda missing: min(missing, 16))


def _at_edge(call: MethodCall) -> MethodCall:
    return _offset(call, lambda missing: missing // 16 * 16 if missing > 16 else missing)
