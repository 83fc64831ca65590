"""Faults of arrays shared by heads or separate per head: one head's array is used for all."""

from __future__ import annotations

from precondattn.arrays import Array, namespace
from precondattn.frame import Frame
from precondattn.spec import linear_family, retention, softmax
from precondattn.spec.array_functions import sum_heads
from precondattn.spec.recurrence import Stream, StreamGradients, TokenByToken
from precondattn.spec.unit_rows import UnitRows
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    STEP,
    STEP_BACKWARD,
    Fault,
    Function,
    inside,
    with_call,
)
from precondattn_conformance.faults.tokens import rolled
from precondattn_conformance.faults.written_by_hand.written import written

RUN = (FORWARD, STEP)
PULL = (BACKWARD, STEP_BACKWARD)


def faults() -> list[Fault]:
    """All faults in this file."""
    return [*_read_from_another(), *_summed()]


def _read_from_another() -> list[Fault]:
    return [
        written(
            "softmax[sink=true]",
            (*RUN, BACKWARD),
            "the sink of the head before",
            inside(softmax, "column", lambda true: lambda sink: rolled(true(sink), 1, axis=0)),
        ),
        written(
            "retention",
            RUN,
            "the decay of the key's head in place of the query's",
            inside(retention, "log_retention", lambda true: _of_key_heads(true)),
        ),
        written(
            "difference[per=head]",
            RUN,
            "λ of the next head",
            with_call(lambda call: call.given(lam=rolled(call.inputs["lam"], 1, axis=0))),
        ),
    ]


def _of_key_heads(true: Function) -> Function:
    def log_retention(heads: int, like: Array) -> Array:
        return namespace(like).repeat(true((heads + 1) // 2, like), 2)[:heads]

    return log_retention


def _summed() -> list[Fault]:
    return [
        written(
            "softmax",
            BACKWARD,
            "the gradients of a group's heads averaged",
            inside(softmax, "sum_heads", lambda _: _mean_of_heads),
        ),
        written(
            "delta",
            PULL,
            "the gradients of value heads averaged over their key head",
            inside(linear_family, "sum_heads", lambda _: _mean_of_heads),
        ),
        written(
            "softmax[bias=true]",
            BACKWARD,
            "the gradient of a shared bias from one head only",
            inside(softmax, "sum_to", lambda _: _first_to),
        ),
        written(
            "kda",
            PULL,
            "one gate's gradient for all key channels",
            inside(TokenByToken, "vjp", lambda true: _mean_of_gates(true)),
        ),
        written(
            "unit_rows[axis=channel]",
            (FORWARD, BACKWARD),
            "one norm for all heads",
            inside(UnitRows, "_along_rows", lambda true: _along_heads_too(true)),
        ),
    ]


def _mean_of_heads(x: Array, heads: int) -> Array:
    return sum_heads(x, heads) * (heads / x.shape[1])


def _first_to(x: Array, shape: tuple[int, ...]) -> Array:
    for axis, (wide, narrow) in enumerate(zip(x.shape, shape, strict=True)):
        if wide != narrow:
            x = x[(slice(None),) * axis + (slice(0, 1),)]
    return x


def _mean_of_gates(true: Function) -> Function:
    def vjp(x: Stream, *rest: object) -> StreamGradients:
        d: StreamGradients = true(x, *rest)
        g = 0 * d.stream.g + d.stream.g.mean(axis=3, keepdims=True)
        return d._replace(stream=d.stream._replace(g=g))

    return vjp


def _along_heads_too(true: Function) -> Function:
    def _along_rows(self: UnitRows, x: Array, frame: Frame, reduce: str) -> Array:
        per_head = true(self, x, frame, reduce)
        return per_head * 0 + getattr(per_head, reduce)(axis=2, keepdims=True)

    return _along_rows
