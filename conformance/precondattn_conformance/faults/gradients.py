"""Faults of gradients: the gradient of one input or one state is left out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from precondattn.algebra.piece import Piece
from precondattn_conformance.faults.applicable import Named
from precondattn_conformance.faults.fault import (
    BACKWARD,
    STEP_BACKWARD,
    MethodCall,
    MethodResult,
    Truth,
    with_result,
)


def gradient(m: Piece, stage: str) -> Named:
    """For each input, a fault that sets its gradient to 0; none is 0 otherwise."""
    if stage in (BACKWARD, STEP_BACKWARD):
        for name in m.inputs:
            yield f"of {name} left out", with_result(partial(_without, name))


def gradient_of_state(m: Piece, stage: str) -> Named:
    """Faults of the gradients of the state before the call and of the state after it."""
    if stage != STEP_BACKWARD:
        return
    for name in _buffers(m):
        yield f"of the first {name} left out", with_result(partial(_of_state, name))
        yield f"of the last {name} ignored", partial(_without_last, name)


def _buffers(m: Piece) -> list[str]:
    if len(m.program.calls) > 1:
        return list(m.program.slots)
    return [slot.name for slot in m.program.calls[0].leaf.slots()]


def _without(name: str, result: MethodResult) -> MethodResult:
    return replace(result, gradients={**result.gradients, name: 0 * result.gradients[name]})


def _of_state(name: str, result: MethodResult) -> MethodResult:
    return replace(result, d_past={**result.d_past, name: 0 * result.d_past[name]})


def _without_last(name: str, truth: Truth, call: MethodCall) -> MethodResult:
    d_buffers = {**call.d_buffers, name: 0 * call.d_buffers[name]}
    return truth(replace(call, d_buffers=d_buffers))


OPERATORS = {"gradient": gradient, "gradient of a state": gradient_of_state}
