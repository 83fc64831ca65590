"""Caches and states: what a step remembers and forgets.

    update ≠ Append(tokens), Replace(state), …    or    past ≠ what the last update made

A buffer may also be right in itself, and mean something else than it does to other backends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import precondattn as pa
from precondattn.cache import Replace, Slot
from precondattn_conformance.faults.applicable import Named
from precondattn_conformance.faults.fault import (
    STEP,
    STEP_BACKWARD,
    Call,
    Result,
    Truth,
    handed,
)
from precondattn_conformance.faults.rounding import to_bfloat16
from precondattn_conformance.faults.tokens import rolled


def slots_of(m: pa.Mechanism) -> dict[str, Slot]:
    """Its buffers, by the names that a call has them under."""
    if len(m.program.calls) > 1:
        return {key: slot for key, (slot, _) in m.program.slots.items()}
    return {slot.name: slot for slot in m.program.calls[0].leaf.slots()}


def _keeps_tokens(slot: Slot) -> bool:
    return slot.pattern.split()[1] == "c"


def update(m: pa.Mechanism, stage: str) -> Named:
    """Of each buffer: it is not updated, or wrongly."""
    if stage != STEP:
        return
    for i, (name, slot) in enumerate(slots_of(m).items()):
        yield f"of {name} dropped", partial(_updated, name, _dropped)
        if _keeps_tokens(slot) and i % 2:
            yield f"of {name} in the wrong order", partial(_updated, name, _in_wrong_order)
        else:
            yield f"of {name} in bfloat16", partial(_updated, name, _rounded)


def _updated(
    name: str, change: Callable[[Call, str, Any], Any], truth: Truth, call: Call
) -> Result:
    result = truth(call)
    return replace(
        result, updates={**result.updates, name: change(call, name, result.updates[name])}
    )


def _dropped(call: Call, name: str, made: Any) -> Any:
    if isinstance(made, Replace):
        return Replace(call.past[name])
    return type(made)(*(0 * array for array in made))


def _rounded(call: Call, name: str, made: Any) -> Any:
    return type(made)(*map(to_bfloat16, made))


def _in_wrong_order(call: Call, name: str, made: Any) -> Any:
    """The new tokens, rolled by one: only a step of several shows it."""
    if isinstance(made, Replace):  # A buffer that was made of several steps.
        return Replace(rolled(made.value, 1))
    return made._replace(tokens=rolled(made.tokens, 1))


def past(m: pa.Mechanism, stage: str) -> Named:
    """What a step reads of the past.

    The last token has not decayed yet, and a buffer of decays has 0 for it in any case.
    """
    if stage != STEP:
        return
    for i, (name, slot) in enumerate(slots_of(m).items()):
        if _keeps_tokens(slot) and name != "decay":
            yield f"{name} without the last token", handed(partial(_without_last, name))
        if not _keeps_tokens(slot) or i == 0 or name == "decay":
            yield f"{name} forgotten", handed(partial(_forgotten, name))


def _forgotten(name: str, call: Call) -> Call:
    return replace(call, past={**call.past, name: 0 * call.past[name]})


def _without_last(name: str, call: Call) -> Call:
    """0 in place of the last token that each sequence holds."""
    buffer = call.past[name].copy()
    for sequence, position in enumerate(call.frame.q_position[:, 0]):
        if position > 0:
            buffer[sequence, int(position) - 1] = 0
    return replace(call, past={**call.past, name: buffer})


def meaning(m: pa.Mechanism, stage: str) -> Named:
    """A buffer with a meaning of its own, to which the backend keeps, and no other."""
    if stage == STEP:
        for name in slots_of(m):
            yield f"{name} kept twice as large, and read so", partial(_doubled, name)


def _doubled(name: str, truth: Truth, call: Call) -> Result:
    result = truth(replace(call, past={**call.past, name: 0.5 * call.past[name]}))
    made = result.updates[name]
    doubled = type(made)(*(2 * array for array in made))
    return replace(result, updates={**result.updates, name: doubled})


def first_state(m: pa.Mechanism, stage: str) -> Named:
    """The gradient as if the state in front of the call were another."""
    if stage != STEP_BACKWARD:
        return
    for name in slots_of(m):
        yield f"{name} taken for zeros", handed(partial(_forgotten, name))


OPERATORS = {"update": update, "meaning": meaning, "past": past, "first state": first_state}
