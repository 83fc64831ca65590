"""Faults of masks and gates: they are not read, or are read at the wrong token.

    visible(i, j)  ≠  j ≤ i,  same segment,  j valid
    e^{g_{t−1}} for e^{g_t},    β_{t+1} for β_t

`heads.py` covers queries, keys and values.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from precondattn.algebra.piece import Piece
from precondattn.arrays import Array, namespace
from precondattn.frame import Frame
from precondattn_conformance.faults.applicable import (
    Named,
    depends_on_validity,
    looks_at_other_tokens,
)
from precondattn_conformance.faults.fault import STEP, STEP_BACKWARD, Change, MethodCall, with_call


def segments(m: Piece, stage: str) -> Named:
    """Wrong segment boundaries; not for steps, since a cache contains one segment."""
    if stage in (STEP, STEP_BACKWARD) or not looks_at_other_tokens(m):
        return
    ignored = {"q_segment": None, "k_segment": None}
    yield "ignored", with_call(lambda call: call.with_frame(**ignored))
    yield "each begins one token late", with_call(_later_segments)
    yield "those of an earlier call of the same shapes", _of_earlier_call()


def _of_earlier_call() -> Change:
    """A mask that is computed once for all calls of one shape."""
    frames: dict[tuple[object, ...], Frame] = {}

    def other(call: MethodCall) -> MethodCall:
        shapes = tuple(tuple(x.shape) for x in call.inputs.values())
        return replace(call, frame=frames.setdefault(shapes, call.frame))

    return with_call(other)


def _later_segments(call: MethodCall) -> MethodCall:
    ids = call.frame.k_segment
    if ids is None:
        return call
    return call.with_segments(namespace(ids).concat([ids[:, :1], ids[:, :-1]], axis=1))


def validity(m: Piece, stage: str) -> Named:
    """Wrong validity of keys, for mechanisms where `depends_on_validity`."""
    if not depends_on_validity(m):
        return
    yield "every key valid", with_call(_all_valid)
    yield "that of the key before", with_call(_late_validity)


def _all_valid(call: MethodCall) -> MethodCall:
    valid = call.frame.k_valid
    return call if valid is None else call.with_frame(k_valid=namespace(valid).ones_like(valid))


def _late_validity(call: MethodCall) -> MethodCall:
    valid = call.frame.k_valid
    return call if valid is None else call.with_frame(k_valid=rolled(valid, 1))


def placement(m: Piece, stage: str) -> Named:
    """Gates, write strengths and other inputs that are not rows, late or early by one token."""
    if not looks_at_other_tokens(m) and len(m.program.calls) == 1:
        return
    for name, pattern in m.inputs.items():
        if pattern.time_axis is None or pattern.is_rows or pattern.is_pairwise:
            continue
        for detail, by in (("before", 1), ("after", -1)):
            yield f"{name} of the token {detail}", with_call(partial(_moved, name, by))


def _moved(name: str, by: int, call: MethodCall) -> MethodCall:
    return call.with_inputs(**{name: rolled(call.inputs[name], by)})


def rolled(x: Array, by: int, axis: int = 1) -> Array:
    """x with its tokens moved by `by`; tokens moved past the end go to the start."""
    return namespace(x).roll(x, by, axis=axis)
