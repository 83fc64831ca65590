"""Faults of states, caches and ragged decoding: not carried over, stale, or of another length."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from precondattn.arrays import Array, namespace
from precondattn.cache import Replace
from precondattn_conformance.faults.fault import (
    FORWARD,
    STEP,
    STEP_BACKWARD,
    Function,
    MethodCall,
    MethodResult,
    Truth,
    inside,
    with_call,
    written,
)
from precondattn_portable import chunkwise

BLOCK = 16
RUN = (FORWARD, STEP)


def _without_last_states(true: Function) -> Function:
    def read(*arguments: Array) -> tuple[Array, list[Array]]:
        out, lasts = true(*arguments)[0], arguments[3]
        return out, [0 * last for last in lasts]

    return read


def _restarted(call: MethodCall) -> MethodCall:
    """Tokens from 1,024 on become a separate segment."""
    frame = call.frame
    position = np.broadcast_to(frame.k_position, (len(call.inputs["k"]), frame.k_position.shape[1]))
    ids = position // 1024 + (0 if frame.k_segment is None else 2 * np.asarray(frame.k_segment))
    return call.with_segments(ids)


def _one_token(call: MethodCall) -> MethodCall:
    """The first row of a sequence without new tokens counts as a token of zeros."""
    frame = call.frame
    if frame.q_valid is None:
        return call
    q_valid, k_valid = np.array(frame.q_valid), np.array(frame.k_valid)
    is_empty = ~q_valid.any(axis=1)
    q_valid[is_empty, 0] = True
    k_valid[is_empty, call.frame.k_position.shape[1] - frame.q_position.shape[1]] = True
    return call.with_frame(q_valid=q_valid, k_valid=k_valid)


def _only_of_part_blocks(truth: Truth, call: MethodCall) -> MethodResult:
    result = truth(call)
    if call.frame.q_position.shape[1] % BLOCK:
        return result
    return replace(result, d_past={name: 0 * d for name, d in result.d_past.items()})


def _pending_kept(truth: Truth, call: MethodCall) -> MethodResult:
    result = truth(call)
    for name, update in result.updates.items():
        if name.startswith("pending"):
            assert isinstance(update, Replace)
            stale = update.value == 0
            update.value[...] = namespace(update.value).where(stale, call.past[name], update.value)
    return result


def _as_longest(call: MethodCall) -> MethodCall:
    position = np.array(call.frame.q_position)
    position[...] = np.max(position, axis=0, keepdims=True)
    return call.with_frame(q_position=position)


def _without_last_block(call: MethodCall) -> MethodCall:
    frame = call.frame
    lengths = np.asarray(frame.q_position)[:, :1]
    slots = frame.k_position.shape[1] - frame.q_position.shape[1]
    valid = np.array(frame.k_valid)
    is_last = np.arange(slots) >= lengths - BLOCK
    valid[:, :slots] &= ~(is_last & (lengths % BLOCK == 0))
    return call.with_frame(k_valid=valid)


class _Remembering:
    """Rows of a buffer that existed in the last step are replaced by that step's rows."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: Array = None

    def __call__(self, truth: Truth, call: MethodCall) -> MethodResult:
        buffer = call.past[self.name]
        length = int(call.frame.q_position[:, 0].min())
        stale, self.rows = self.rows, buffer[:, :length].copy()
        if stale is None or not length:  # This is a new cache.
            return truth(call)
        sequences, rows = (
            min(sizes) for sizes in zip(stale.shape[:2], self.rows.shape, strict=False)
        )
        mixed = buffer.copy()
        mixed[:sequences, :rows] = stale[:sequences, :rows]
        return truth(replace(call, past={**call.past, self.name: mixed}))


FAULTS = [
    written(
        "linear",
        RUN,
        "the state not carried from a group of chunks to the next",
        inside(chunkwise, "_read", _without_last_states),
        carrier="blocks",
    ),
    written("linear", FORWARD, "a state of the last 1024 tokens", with_call(_restarted)),
    written("retention", STEP, "a sequence without new tokens decays", with_call(_one_token)),
    written(
        "gla",
        STEP_BACKWARD,
        "no gradient of the first state after whole blocks",
        _only_of_part_blocks,
    ),
    written("path[flush=2]", STEP, "the pending reflections kept after the flush", _pending_kept),
    written("softmax", STEP, "positions of the longest sequence", with_call(_as_longest)),
    written(
        "lucid_solve",
        STEP,
        "a cache that ends at a block's edge without its last block",
        with_call(_without_last_block),
    ),
    written(
        "softmax",
        STEP,
        "rows of key kept since the last step of the same sequences",
        _Remembering("key"),
        operator="memory of a cache",
    ),
]
