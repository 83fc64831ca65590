"""Faults that show only at certain levels of the design: lengths, masks, widths, views, orders.

They are typical of kernels: an index that is right for one sequence, a stride for equal widths, a
comparison at the edge of a block, a workspace or compiled kernel that is cached by shapes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from precondattn.algebra.piece import Piece
from precondattn.arrays import Array
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    STEP,
    Fault,
    MethodCall,
    MethodResult,
    Truth,
    with_call,
)
from precondattn_conformance.faults.written_by_hand.written import written

BLOCK = 16


def faults() -> list[Fault]:
    """All faults in this file."""
    return [
        written("softmax", STEP, "every sequence is as long as the first", with_call(_as_first)),
        written(
            "lucid_solve", STEP, "every sequence is as long as the first", with_call(_as_first)
        ),
        written("softmax", FORWARD, "only d columns of wider values", _only_d_columns),
        written("gated_delta", FORWARD, "only d columns of wider values", _only_d_columns),
        written("softmax", FORWARD, "no segment begins at a block's edge", with_call(_merged)),
        written("gla", FORWARD, "no segment begins at a block's edge", with_call(_merged)),
        written("softmax", FORWARD, "zeros after the first of an expanded axis", with_call(_dense)),
        written("path", FORWARD, "zeros after the first of an expanded axis", with_call(_dense)),
        written(
            "softmax",
            (FORWARD, BACKWARD),
            "the output of the last forward of these shapes",
            _Kept(),
        ),
        written("softmax", FORWARD, "the options of the first call of these shapes", _Compiled()),
        written("linear", FORWARD, "the options of the first call of these shapes", _Compiled()),
    ]


def _as_first(call: MethodCall) -> MethodCall:
    """All sequences get the positions of the first sequence's new tokens."""
    position = call.frame.q_position
    first = np.broadcast_to(position[:1], position.shape)
    keys = np.array(call.frame.k_position)
    keys[:, keys.shape[1] - first.shape[1] :] = first
    return replace(call, frame=call.frame.replaced(q_position=first, k_position=keys))


def _only_d_columns(truth: Truth, call: MethodCall) -> MethodResult:
    result = truth(call)
    out = result.out.copy()
    out[..., call.inputs["k"].shape[-1] :] = 0
    return replace(result, out=out)


def _merged(call: MethodCall) -> MethodCall:
    """If a segment begins at a block's edge, its tokens belong to the segment before it."""

    def without_edges(segments: Array) -> Array:
        if segments is None:
            return None
        begins = np.zeros(segments.shape, dtype=int)
        begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
        begins[:, ::BLOCK] = 0
        return np.cumsum(begins, axis=1)

    frame = call.frame
    if frame.q_segment is None or frame.k_segment is None:
        return call
    if frame.q_segment.shape != frame.k_segment.shape:
        return call
    changed = without_edges(frame.k_segment)
    return replace(call, frame=frame.replaced(q_segment=changed, k_segment=changed))


def _dense(call: MethodCall) -> MethodCall:
    """An expanded array read as if its entries were stored one after another."""
    inputs = dict(call.inputs)
    for name, array in inputs.items():
        for axis, (stride, size) in enumerate(zip(array.strides, array.shape, strict=True)):
            if stride == 0 and size > 1:
                kept = (np.arange(size) == 0).reshape(-1, *(1,) * (array.ndim - axis - 1))
                inputs[name] = np.where(kept, array, 0).astype(array.dtype)
    return replace(call, inputs=inputs)


def _shapes(call: MethodCall) -> tuple[object, ...]:
    return tuple((name, array.shape, str(array.dtype)) for name, array in call.inputs.items())


class _Kept:
    """A workspace for the output that all calls of the same shapes share."""

    def __init__(self) -> None:
        self.outputs: dict[tuple[object, ...], Array] = {}

    def __call__(self, truth: Truth, call: MethodCall) -> MethodResult:
        if call.stage == FORWARD:
            result = truth(call)
            self.outputs[_shapes(call)] = result.out
            return result
        return truth(replace(call, out=self.outputs.get(_shapes(call), call.out)))


class _Compiled:
    """A compiled kernel that is cached by shapes, but not by options."""

    def __init__(self) -> None:
        self.mechanisms: dict[tuple[object, ...], Piece] = {}

    def __call__(self, truth: Truth, call: MethodCall) -> MethodResult:
        first = self.mechanisms.setdefault(_shapes(call), call.mechanism)
        return truth(replace(call, mechanism=first))
