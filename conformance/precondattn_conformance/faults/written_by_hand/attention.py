"""Faults of softmax attention and its reads: masks, ranges, and errors that occur only in steps."""

from __future__ import annotations

from dataclasses import replace

from precondattn.arrays import Array, namespace
from precondattn.spec import softmax
from precondattn.spec.array_functions import row_sum
from precondattn.spec.laser import LogMeanExp
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    STEP,
    Fault,
    MethodCall,
    inside,
    with_call,
)
from precondattn_conformance.faults.options import with_option
from precondattn_conformance.faults.written_by_hand.written import written

BOTH = (FORWARD, BACKWARD)


def faults() -> list[Fault]:
    """All faults in this file."""
    return [*_of_softmax(), *_of_reads()]


def _of_softmax() -> list[Fault]:
    return [
        written(
            "softmax",
            STEP,
            "no maximum subtracted before the exponential of a step",
            inside(softmax, "log_softmax", lambda _: _unshifted),
        ),
        written(
            "softmax",
            (FORWARD, STEP),
            "masked pairs at -1e9: a query without keys reads the mean",
            inside(softmax, "mask_scores", lambda _: _finite_mask),
        ),
        written(
            "softmax",
            (FORWARD, BACKWARD),
            "the segments of the first keys in place of those of the queries",
            with_call(_with_segments_of_first_keys),
        ),
        written(
            "softmax",
            FORWARD,
            "keys more than 128 tokens back masked",
            with_option("window", lambda _: 129),
        ),
        written(
            "softmax[bias=true]",
            (FORWARD, STEP),
            "a bias of -inf replaced by -1e9",
            with_call(lambda call: call.given(bias=call.inputs["bias"].clip(-1e9))),
        ),
        written(
            "softmax",
            STEP,
            "new tokens do not attend to one another",
            with_call(_without_new_keys),
        ),
    ]


def _unshifted(x: Array, more: Array | None = None) -> tuple[Array, Array]:
    xp = namespace(x)
    total = row_sum(xp.exp(x)) + (0.0 if more is None else xp.exp(more))
    log_total = xp.log(xp.where(total > 0, total, 1.0))
    return x - log_total, log_total


def _finite_mask(visible: Array, scores: Array) -> Array:
    return namespace(scores).where(visible, scores, -1e9)


def _with_segments_of_first_keys(call: MethodCall) -> MethodCall:
    frame = call.frame
    if frame.k_segment is None:
        return call
    first = frame.k_segment[:, : frame.q_position.shape[1]]
    return replace(call, frame=frame.replaced(q_segment=first))


def _without_new_keys(call: MethodCall) -> MethodCall:
    """New tokens attend to themselves and cached keys, but not to each other."""
    frame = call.frame
    t = frame.q_position.shape[1]
    later = namespace(frame.q_position).arange(t)[None, :] * 1_000_000
    position = namespace(later).concat([frame.k_position[:, :-t], frame.q_position + later], axis=1)
    return replace(call, frame=frame.replaced(k_position=position))


def _of_reads() -> list[Fault]:
    return [
        written(
            "laser",
            (*BOTH, STEP),
            "one shift for all tokens, future ones included",
            inside(LogMeanExp, "forward", lambda _: _laser_of_one_shift),
            subject="softmax",
        ),
        written(
            "laser",
            (FORWARD, STEP),
            "the mean of values clipped to ±2",
            inside(
                LogMeanExp,
                "forward",
                lambda true: lambda self, a, total, v: true(self, a, total, v.clip(-2, 2)),
            ),
            subject="softmax",
        ),
    ]


def _laser_of_one_shift(self: LogMeanExp, log_weights: Array, log_total: Array, v: Array) -> Array:
    xp = namespace(v)
    shift = xp.max(v, axis=2, keepdims=True)
    mean = xp.exp(log_weights) @ xp.exp(v - shift)
    some = xp.max(log_weights, axis=-1, keepdims=True) > -xp.inf
    return xp.where(some, shift + xp.log(xp.where(some, mean, 1.0)), 0.0)
