"""How a composition's leaves are put together: who reads what, and whose gradients are summed.

    y = lucid_solve(k, v);  o = softmax(q, k, v := v)      and not  v := y

For the carrier that does all of a composition in one go.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import precondattn as pa
from precondattn.algebra.declaration import Pattern
from precondattn.arrays import Array
from precondattn_conformance.faults import whole
from precondattn_conformance.faults.applicable import Named
from precondattn_conformance.faults.fault import (
    BACKWARD,
    STEP_BACKWARD,
    Arrays,
    Call,
    handed,
    inside,
)


def wiring(m: pa.Mechanism, stage: str) -> Named:
    """A leaf reads what went into the leaf before it, in place of what came out.

    Only where the two have the same shape. In the gradient the forward pass was right.
    """
    program = m.program
    made = {call.out: call for call in program.calls}
    patterns = {value: _pattern(m, value) for value in (*program.inputs, *made)}
    for i, call in enumerate(program.calls):
        for formal, value in call.arguments:
            source = made.get(value)
            if source is None:
                continue
            for _, other in source.arguments:
                if other != value and patterns[other] == patterns[value]:
                    yield (
                        f"{call.leaf.name} reads {other} for {value}",
                        handed(partial(_rewired, (i, formal), other)),
                    )
                    break


def _pattern(m: pa.Mechanism, value: str) -> str:
    """The shape of a value in the letters of the program, keys and queries alike."""
    program = m.program
    if value in program.inputs:
        return str(program.inputs[value])
    index = next(i for i, call in enumerate(program.calls) if call.out == value)
    own = Pattern.read(program.calls[index].leaf.output)
    return str(own.substituted(program.axes[index]))


def _rewired(place: tuple[int, str], value: str, call: Call) -> Call:
    return replace(call, wiring={place: value})


def shared(m: pa.Mechanism, stage: str) -> Named:
    """The gradient of what several leaves read is that of one of them."""
    read = [value for call in m.program.calls for _, value in call.arguments]
    if stage in (BACKWARD, STEP_BACKWARD) and len(set(read)) < len(read):
        yield "gradient of the last reader only", inside(whole, "accumulate", _first_only)
        yield "gradient of the first reader only", inside(whole, "accumulate", _last_only)


def _first_only(accumulate: Any) -> Any:
    def changed(cotangents: Arrays, value: str, gradient: Array) -> None:
        cotangents.setdefault(value, gradient)

    return changed


def _last_only(accumulate: Any) -> Any:
    def changed(cotangents: Arrays, value: str, gradient: Array) -> None:
        cotangents[value] = gradient

    return changed


OPERATORS = {"wiring": wiring, "shared input": shared}
