"""Faults of gradients: one that is left out, halved, or negated.

    dx = 0,    dx / 2,    −dx

for one input, or for one state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import precondattn as pa
from precondattn.arrays import Array
from precondattn_conformance.faults.applicable import Named
from precondattn_conformance.faults.fault import (
    BACKWARD,
    STEP_BACKWARD,
    Call,
    Result,
    Truth,
    with_result,
)

KINDS: tuple[tuple[str, Callable[[Array], Array]], ...] = (
    ("left out", lambda d: 0 * d),
    ("by half", lambda d: 0.5 * d),
    ("of the other sign", lambda d: -d),
)


def gradient(m: pa.Mechanism, stage: str) -> Named:
    """One kind for each input, in turn. Every input has a gradient that is not 0."""
    if stage not in (BACKWARD, STEP_BACKWARD):
        return
    for i, name in enumerate(m.inputs):
        kind, change = KINDS[i % len(KINDS)]
        yield f"of {name} {kind}", with_result(partial(_of_input, name, change))


def gradient_of_state(m: pa.Mechanism, stage: str) -> Named:
    """The gradient of the state before the call, and that of the state after it."""
    if stage != STEP_BACKWARD:
        return
    for name in _buffers(m):
        yield f"of the first {name} left out", with_result(partial(_of_state, name))
        yield f"of the last {name} ignored", partial(_without_last, name)


def _buffers(m: pa.Mechanism) -> list[str]:
    if len(m.program.calls) > 1:
        return list(m.program.slots)
    return [slot.name for slot in m.program.calls[0].leaf.slots()]


def _of_input(name: str, change: Callable[[Array], Array], result: Result) -> Result:
    changed = {**result.gradients, name: change(result.gradients[name])}
    return replace(result, gradients=changed)


def _of_state(name: str, result: Result) -> Result:
    return replace(result, d_past={**result.d_past, name: 0 * result.d_past[name]})


def _without_last(name: str, truth: Truth, call: Call) -> Result:
    d_buffers = {**call.d_buffers, name: 0 * call.d_buffers[name]}
    return truth(replace(call, d_buffers=d_buffers))


OPERATORS = {"gradient": gradient, "gradient of a state": gradient_of_state}
