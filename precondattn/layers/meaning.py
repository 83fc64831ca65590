"""The meaning of a mechanism's inputs: the leaf that reads each, and the leaf's name for it.

For example, CCQ's norm reads the input k of `ccq(gated_delta)`, and the delta rule reads the result
as its k. So the input means the k of `gated_delta`, whose recipe is used. An input that does not
reach a base, such as λ, has the meaning that the leaf which reads it declares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from precondattn.algebra.declaration import Pattern
from precondattn.algebra.leaf_protocol import LeafCall
from precondattn.algebra.mechanism import Mechanism, Preconditioner, with_base
from precondattn.algebra.program import Program


class Meaning(NamedTuple):
    """A leaf call, and its name for one of its inputs."""

    call: LeafCall
    formal: str


def meanings(program: Program) -> dict[str, Meaning]:
    """The meaning of every input of a program."""
    by_input: dict[str, Meaning] = {}
    for call in program.calls:  # An input of any length does not use the base's recipe.
        for formal, value in call.arguments:
            if formal in call.leaf.allows_any_length:
                by_input.setdefault(origin(program, value), Meaning(call, formal))
    for is_base in (True, False):
        for call in program.calls:
            if call.leaf.is_base is is_base:
                for formal, value in call.arguments:
                    by_input.setdefault(origin(program, value), Meaning(call, formal))
    return {name: by_input[name] for name in program.inputs}


def changed_inside(
    mechanism: Mechanism, change: Callable[[Mechanism], Mechanism | None]
) -> Mechanism | None:
    """The mechanism with the first part changed for which `change` is not None; None without one.

    The parts are the mechanism, its base, the base of that, and so on.
    """
    changed = change(mechanism)
    if changed is not None or not isinstance(mechanism, Preconditioner):
        return changed
    base = changed_inside(mechanism.base, change)
    return None if base is None else with_base(mechanism, base)


def origin(program: Program, value: str) -> str:
    """The input from which leaves compute a value row by row; the value itself if there is none."""
    call = next((call for call in program.calls if call.out == value), None)
    rows = [] if call is None or call.leaf.is_base else _rows(call)
    return origin(program, rows[0]) if rows else value


def _rows(call: LeafCall) -> list[str]:
    """The values with the axes of a leaf's output."""
    letters = Pattern.read(call.leaf.output).letters
    return [v for formal, v in call.arguments if call.leaf.inputs[formal].letters == letters]


def output_call(program: Program, is_known: Callable[[LeafCall], bool]) -> LeafCall:
    """The last leaf call for which `is_known` holds and from which the output follows row by row.

    Without one, it is the base.
    """
    value = program.out
    while True:
        call = next(call for call in program.calls if call.out == value)
        rows = _rows(call)
        is_computed = bool(rows) and rows[0] not in program.inputs
        if is_known(call) or call.leaf.is_base or not is_computed:
            return call
        value = rows[0]
