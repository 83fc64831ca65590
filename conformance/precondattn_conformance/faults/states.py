"""Faults of caches and states: wrong updates, and wrong use of the buffers.

    update ≠ Append(tokens), Replace(state), …    or    past ≠ the result of the last update

A buffer may also be consistent, but have another meaning than for other backends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from precondattn.algebra.piece import Piece
from precondattn.cache import Replace, Slot, Update
from precondattn_conformance.faults.applicable import Named
from precondattn_conformance.faults.fault import (
    STEP,
    STEP_BACKWARD,
    MethodCall,
    MethodResult,
    Truth,
    to_bfloat16,
    with_call,
    with_result,
)
from precondattn_conformance.faults.masks import rolled


def slots_of(m: Piece) -> dict[str, Slot]:
    """The slots of a mechanism's buffers, by their names in a call."""
    if len(m.program.calls) > 1:
        return {key: slot for key, (slot, _) in m.program.slots.items()}
    return {slot.name: slot for slot in m.program.calls[0].leaf.slots()}


def _keeps_tokens(slot: Slot) -> bool:
    return slot.pattern.split()[1] == "c"


def update(m: Piece, stage: str) -> Named:
    """For each buffer: it is not updated, or updated wrongly."""
    if stage != STEP:
        return
    for i, (name, slot) in enumerate(slots_of(m).items()):
        yield f"of {name} dropped", partial(_updated, name, _dropped)
        if _keeps_tokens(slot) and i % 2:
            yield f"of {name} in the wrong order", partial(_updated, name, _in_wrong_order)
        else:
            yield f"of {name} in bfloat16", partial(_updated, name, _rounded)


def _updated(
    name: str, change: Callable[[MethodCall, str, Update], Update], truth: Truth, call: MethodCall
) -> MethodResult:
    result = truth(call)
    return replace(
        result, updates={**result.updates, name: change(call, name, result.updates[name])}
    )


def _dropped(call: MethodCall, name: str, correct: Update) -> Update:
    if isinstance(correct, Replace):
        return Replace(call.past[name])
    return type(correct)(*(0 * array for array in correct))


def _rounded(call: MethodCall, name: str, correct: Update) -> Update:
    return type(correct)(*map(to_bfloat16, correct))


def _in_wrong_order(call: MethodCall, name: str, correct: Update) -> Update:
    """The new tokens rolled by one, which changes only steps of several tokens."""
    if isinstance(correct, Replace):  # Such a buffer may have been updated by several steps.
        return Replace(rolled(correct.value, 1))
    return correct._replace(tokens=rolled(correct.tokens, 1))


def past(m: Piece, stage: str) -> Named:
    """A step that reads the buffers wrongly.

    A buffer of decays does not get the fault of losing its last token, whose entry is 0 anyway.
    """
    if stage != STEP:
        return
    for i, (name, slot) in enumerate(slots_of(m).items()):
        if _keeps_tokens(slot) and name != "decay":
            yield f"{name} without the last token", with_call(partial(_without_last, name))
        if not _keeps_tokens(slot) or i == 0 or name == "decay":
            yield f"{name} read as zeros", with_call(partial(_zeroed, name))


def _zeroed(name: str, call: MethodCall) -> MethodCall:
    return replace(call, past={**call.past, name: 0 * call.past[name]})


def _without_last(name: str, call: MethodCall) -> MethodCall:
    """The buffer with 0 for the last token of each sequence."""
    buffer = call.past[name].copy()
    for sequence, position in enumerate(call.frame.q_position[:, 0]):
        if position > 0:
            buffer[sequence, int(position) - 1] = 0
    return replace(call, past={**call.past, name: buffer})


def meaning(m: Piece, stage: str) -> Named:
    """A buffer with another meaning, which the backend writes and reads consistently."""
    if stage == STEP:
        for name in slots_of(m):
            yield f"{name} stored twice as large, and halved when read", partial(_doubled, name)


def _doubled(name: str, truth: Truth, call: MethodCall) -> MethodResult:
    result = truth(replace(call, past={**call.past, name: 0.5 * call.past[name]}))
    correct = result.updates[name]
    doubled = type(correct)(*(2 * array for array in correct))
    return replace(result, updates={**result.updates, name: doubled})


def first_state(m: Piece, stage: str) -> Named:
    """The gradient computed from a wrong initial state."""
    if stage != STEP_BACKWARD:
        return
    for name in slots_of(m):
        yield f"{name} replaced by zeros", with_call(partial(_zeroed, name))


def gradient_of_state(m: Piece, stage: str) -> Named:
    """Faults of the gradients of the state before the call and of the state after it."""
    if stage != STEP_BACKWARD:
        return
    for name in slots_of(m):
        yield f"of the first {name} left out", with_result(partial(_of_state, name))
        yield f"of the last {name} ignored", partial(_without_later, name)


def _of_state(name: str, result: MethodResult) -> MethodResult:
    return replace(result, d_past={**result.d_past, name: 0 * result.d_past[name]})


def _without_later(name: str, truth: Truth, call: MethodCall) -> MethodResult:
    d_buffers = {**call.d_buffers, name: 0 * call.d_buffers[name]}
    return truth(replace(call, d_buffers=d_buffers))
