"""Faults of masks that are longer than a block, and of two masks at once.

A kernel reads keys in blocks. Whether a block is read, and where a mask begins in it, is decided
for the whole block.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    MethodCall,
    with_call,
    written,
)

BOTH = (FORWARD, BACKWARD)
BLOCK = 16


def _first_64_keys(call: MethodCall) -> MethodCall:
    if call.frame.k_valid is None:
        return call
    valid = np.array(call.frame.k_valid)
    valid[:, 64:] = True
    return call.with_frame(k_valid=valid)


def _lengths_alone(call: MethodCall) -> MethodCall:
    q_valid, k_valid = call.frame.q_valid, call.frame.k_valid
    if q_valid is None or k_valid is None or q_valid.shape != k_valid.shape:
        return call
    return call.with_frame(k_valid=np.array(q_valid))


def _with_segments(
    change: Callable[[np.ndarray], np.ndarray],
) -> Callable[[MethodCall], MethodCall]:
    def changed(call: MethodCall) -> MethodCall:
        ids = call.frame.k_segment
        return call if ids is None else call.with_segments(change(np.asarray(ids)))

    return changed


def _begins(ids: np.ndarray) -> np.ndarray:
    """Whether a segment begins at a token."""
    begins = np.ones(ids.shape, dtype=bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return begins


def _cut_after_128(ids: np.ndarray) -> np.ndarray:
    begins, index = _begins(ids), np.arange(ids.shape[1])
    start = np.maximum.accumulate(np.where(begins, index, 0), axis=1)
    return np.asarray(np.cumsum(begins, axis=1) * ids.shape[1] + (index - start) // 128)


def _merged_at_edges(ids: np.ndarray) -> np.ndarray:
    """A segment that begins at a block's edge belongs to the segment before it."""
    begins = _begins(ids)
    begins[:, ::BLOCK] = False
    return np.cumsum(begins, axis=1)


def _near(call: MethodCall) -> MethodCall:
    frame = call.frame
    missing = frame.k_position.shape[1] - frame.q_position.shape[1]
    moved = frame.q_position - missing + min(missing, 16)
    return call.with_frame(q_position=moved)


FAULTS = [
    written("softmax", BOTH, "the key mask of the first 64 keys only", with_call(_first_64_keys)),
    written("lucid_solve", FORWARD, "lengths, and so no key mask", with_call(_lengths_alone)),
    written(
        "gla", BOTH, "a segment cut after 128 tokens", with_call(_with_segments(_cut_after_128))
    ),
    written(
        "gla",
        FORWARD,
        "no segment begins at a block's edge",
        with_call(_with_segments(_merged_at_edges)),
    ),
    written("softmax", BOTH, "queries at most 16 keys after the first", with_call(_near)),
]
