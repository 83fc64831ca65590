"""Faults of the state of linear attention: not carried over, not reset, or written by padding."""

from __future__ import annotations

from dataclasses import replace

from precondattn.arrays import Array, Arrays, namespace
from precondattn.spec import linear, linear_family
from precondattn.spec.recurrence import Stream, TokenByToken
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    STEP,
    Fault,
    Function,
    MethodCall,
    MethodResult,
    Truth,
    inside,
)
from precondattn_conformance.faults.written_by_hand.written import written


def faults() -> list[Fault]:
    """All faults in this file."""
    return [
        written(
            "linear",
            FORWARD,
            "the state not carried beyond 128 tokens",
            _with_resets,
        ),
        written(
            "linear",
            STEP,
            "the state before the last token kept",
            inside(TokenByToken, "forward", lambda true: _stopping_early(true)),
        ),
        written(
            "linear",
            (FORWARD, BACKWARD),
            "the state not reset at the first token of a segment",
            inside(linear_family, "forget_other_segments", lambda _: lambda g, frame: g),
        ),
        written(
            "elu1(linear[normalize=true])",
            STEP,
            "the sum of weights reset at every step",
            inside(linear, "with_mass", lambda true: _without_mass(true)),
            subject="linear",
        ),
        written(
            "elu1(linear[normalize=true])",
            (FORWARD, STEP),
            "the features of a padded key are written",
            inside(linear_family, "where_valid", lambda _: lambda x, frame: x),
            subject="linear",
        ),
    ]


def _with_resets(truth: Truth, call: MethodCall) -> MethodResult:
    """The state is reset every 128 tokens."""
    t = call.inputs["q"].shape[1]
    if t <= 128 or call.frame.k_segment is not None:
        return truth(call)
    outs = []
    for i in range(0, t, 128):
        part = {name: x[:, i : i + 128] for name, x in call.inputs.items()}
        outs.append(truth(replace(call, inputs=part)).out)
    return MethodResult(namespace(outs[0]).concat(outs, axis=1))


def _stopping_early(true: Function) -> Function:
    def forward(x: Stream, state: Array) -> tuple[Array, Array]:
        o, _ = true(x, state)
        if x.k.shape[2] == 1:
            return o, state
        fewer = x._replace(**{n: a if a is None else a[:, :, :-1] for n, a in x._asdict().items()})
        return o, true(fewer, state)[1]

    return forward


def _without_mass(true: Function) -> Function:
    def with_mass(state: Arrays) -> Array:
        return true({**state, "mass": 0 * state["mass"]})

    return with_mass
