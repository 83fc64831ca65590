"""Faults of ragged decoding, where sequences of a batch get different numbers of new tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from precondattn.arrays import Array
from precondattn.frame import Frame
from precondattn_conformance.faults.fault import (
    STEP,
    STEP_BACKWARD,
    Fault,
    Function,
    MethodCall,
    MethodResult,
    Truth,
    inside,
    with_call,
)
from precondattn_conformance.faults.written_by_hand.written import written

BLOCK = 16


def faults() -> list[Fault]:
    """All faults in this file."""
    return [
        written("softmax", STEP, "positions of the longest sequence", with_call(_as_longest)),
        written("path", STEP, "as many cached keys as the first sequence has", with_call(_cached)),
        written(
            "lucid_solve",
            STEP,
            "a cache that ends at a block's edge without its last block",
            with_call(_without_last_block),
        ),
        written(
            "softmax",
            STEP,
            "new tokens after a block's edge do not see those before it",
            inside(Frame, "visible", _within_blocks),
        ),
        written("retention", STEP, "a sequence without new tokens decays", with_call(_one_token)),
        written(
            "gla",
            STEP_BACKWARD,
            "no gradient of the first state after whole blocks",
            _only_of_part_blocks,
        ),
        written("gated_delta", STEP, "the state of a sequence without new tokens is 0", _lost),
    ]


def _as_longest(call: MethodCall) -> MethodCall:
    position = np.array(call.frame.q_position)
    position[...] = np.max(position, axis=0, keepdims=True)
    return replace(call, frame=call.frame.replaced(q_position=position))


def _slots(call: MethodCall) -> int:
    """The capacity of the cache."""
    return int(call.frame.k_position.shape[1] - call.frame.q_position.shape[1])


def _with_past_validity(
    call: MethodCall, change: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> MethodCall:
    valid = np.array(call.frame.k_valid)
    slots = _slots(call)
    valid[:, :slots] = change(valid[:, :slots], call.frame.q_position[:, 0])
    return replace(call, frame=call.frame.replaced(k_valid=valid))


def _cached(call: MethodCall) -> MethodCall:
    return _with_past_validity(call, lambda valid, held: np.arange(valid.shape[1]) < held[0])


def _without_last_block(call: MethodCall) -> MethodCall:
    def changed(valid: np.ndarray, held: np.ndarray) -> np.ndarray:
        is_last = np.arange(valid.shape[1]) >= held[:, None] - BLOCK
        return np.asarray(valid & ~(is_last & (held % BLOCK == 0)[:, None]))

    return _with_past_validity(call, changed)


def _within_blocks(true: Function) -> Function:
    """New keys are visible only to queries of the same block; cached keys to all."""

    def visible(frame: Frame, **options: object) -> Array:
        mask = true(frame, **options)
        t, s = mask.shape[-2:]
        query, key = frame.q_position[:, None, :, None], frame.k_position[:, None, None, :]
        is_new = np.arange(s) >= s - t
        return mask & ((query // BLOCK == key // BLOCK) | ~is_new)

    return visible


def _one_token(call: MethodCall) -> MethodCall:
    """In a sequence without new tokens, the first row counts as a token of zeros."""
    frame = call.frame
    if frame.q_valid is None:
        return call
    q_valid, k_valid = np.array(frame.q_valid), np.array(frame.k_valid)
    is_empty = ~q_valid.any(axis=1)
    q_valid[is_empty, 0] = True
    k_valid[is_empty, _slots(call)] = True
    return replace(call, frame=frame.replaced(q_valid=q_valid, k_valid=k_valid))


def _only_of_part_blocks(truth: Truth, call: MethodCall) -> MethodResult:
    result = truth(call)
    if call.frame.q_position.shape[1] % BLOCK:
        return result
    return replace(result, d_past={name: 0 * d for name, d in result.d_past.items()})


def _lost(truth: Truth, call: MethodCall) -> MethodResult:
    result, valid = truth(call), call.frame.q_valid
    if valid is None:
        return result
    is_empty = ~valid.any(axis=1)
    updates = {
        name: type(update)(*(_zero_at(array, is_empty) for array in update))
        for name, update in result.updates.items()
    }
    return replace(result, updates=updates)


def _zero_at(array: Array, sequences: np.ndarray) -> Array:
    array = np.array(array)
    array[sequences] = 0
    return array
