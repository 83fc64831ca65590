"""Faults of wiring: a leaf of a composition reads the wrong array, or gradients are not summed.

    y = lucid_solve(k, v);  o = softmax(q, k, v := v)      and not  v := y

They are for the carrier that runs a composition as one call.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from precondattn.algebra.declaration import Pattern
from precondattn.algebra.piece import Piece
from precondattn.arrays import Array, Arrays
from precondattn_conformance.faults import whole
from precondattn_conformance.faults.applicable import Named
from precondattn_conformance.faults.fault import (
    BACKWARD,
    STEP_BACKWARD,
    Function,
    MethodCall,
    inside,
    with_call,
)


def wiring(m: Piece, stage: str) -> Named:
    """A leaf reads an input of the leaf before it, in place of that leaf's output.

    Both arrays must have the same shape. In a faulty backward call, the forward call was right.
    """
    program = m.program
    calls_by_output = {call.out: call for call in program.calls}
    patterns = {name: _pattern(m, name) for name in (*program.inputs, *calls_by_output)}
    for i, call in enumerate(program.calls):
        for formal, name in call.arguments:
            source = calls_by_output.get(name)
            if source is None:
                continue
            for _, other in source.arguments:
                if other != name and patterns[other] == patterns[name]:
                    yield (
                        f"{call.leaf.name} reads {other} for {name}",
                        with_call(partial(_rewired, (i, formal), other)),
                    )
                    break


def _pattern(m: Piece, name: str) -> str:
    """The axes of an array of the program, in the program's letters."""
    program = m.program
    if name in program.inputs:
        return str(program.inputs[name])
    index = next(i for i, call in enumerate(program.calls) if call.out == name)
    pattern = Pattern.read(program.calls[index].leaf.output)
    return str(pattern.substituted(program.axes[index]))


def _rewired(key: tuple[int, str], name: str, call: MethodCall) -> MethodCall:
    return replace(call, wiring={key: name})


def shared(m: Piece, stage: str) -> Named:
    """The gradient of an array that several leaves read, computed from only one of them."""
    names = [name for call in m.program.calls for _, name in call.arguments]
    if stage in (BACKWARD, STEP_BACKWARD) and len(set(names)) < len(names):
        yield "gradient of the last reader only", inside(whole, "accumulate", _first_only)
        yield "gradient of the first reader only", inside(whole, "accumulate", _last_only)


def _first_only(accumulate: Function) -> Function:
    def changed(cotangents: Arrays, name: str, gradient: Array) -> None:
        cotangents.setdefault(name, gradient)

    return changed


def _last_only(accumulate: Function) -> Function:
    def changed(cotangents: Arrays, name: str, gradient: Array) -> None:
        cotangents[name] = gradient

    return changed
