"""Faults in residuals: backward receives arrays that forward did not produce.

    backward(x, out′, residuals′, cotangent),    out′ ≠ out  or  residuals′ ≠ residuals

A backward that recomputes everything from the inputs can not have such a fault.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from precondattn.algebra.piece import Piece
from precondattn_conformance.faults.applicable import Named, reads_its_output
from precondattn_conformance.faults.fault import (
    BACKWARD,
    MethodCall,
    MethodResult,
    Truth,
    to_bfloat16,
    with_call,
)
from precondattn_conformance.faults.masks import rolled


def saved_output(m: Piece, stage: str) -> Named:
    """A wrong output, for mechanisms where backward `reads_its_output`."""
    if stage != BACKWARD or not reads_its_output(m):
        return
    yield "kept in bfloat16", with_call(lambda call: replace(call, out=to_bfloat16(call.out)))
    yield (
        "of another sequence",
        with_call(lambda call: replace(call, out=rolled(call.out, 1, axis=0))),
    )


def overwritten(truth: Truth, call: MethodCall) -> MethodResult:
    """The gradient, after which its residuals are 0."""
    result = truth(call)
    for x in call.residuals:
        x[...] = 0
    return result


def value_between(m: Piece, stage: str) -> Named:
    """Wrong intermediate results, which a mechanism run as one call keeps as residuals."""
    program = m.program
    if stage != BACKWARD:
        return
    kept = [call.out for call in program.calls if call.out != program.out]
    for i, name in enumerate(kept):
        yield f"{name} kept in bfloat16", with_call(partial(_changed, i))
    if kept:
        yield "overwritten by the first gradient", overwritten


def _changed(number: int, call: MethodCall) -> MethodCall:
    kept = [*call.residuals]
    kept[number] = to_bfloat16(kept[number])
    return replace(call, residuals=tuple(kept))
