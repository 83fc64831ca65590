"""What the gradient is told of the forward pass, and is not what that made.

    backward(x, out′, residuals′, cotangent),    out′ ≠ out  or  residuals′ ≠ residuals

A gradient that makes all of it again from the inputs can not be told anything wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import precondattn as pa
from precondattn.arrays import Array
from precondattn_conformance.faults.applicable import Named, leaves, reads_its_output
from precondattn_conformance.faults.fault import BACKWARD, Call, Change, Result, Truth, handed
from precondattn_conformance.faults.rounding import to_bfloat16
from precondattn_conformance.faults.tokens import rolled


def saved_output(m: pa.Mechanism, stage: str) -> Named:
    """See `reads_its_output`: elsewhere the output is made again, or not needed."""
    if stage != BACKWARD or not reads_its_output(m):
        return
    yield "kept in bfloat16", handed(lambda call: replace(call, out=to_bfloat16(call.out)))
    yield "of another sequence", handed(lambda call: replace(call, out=rolled(call.out, 1, axis=0)))


def residual(m: pa.Mechanism, stage: str) -> Named:
    """The sums of each row's weights, which the blocked attention keeps as logarithms."""
    if stage != BACKWARD or not leaves(m, pa.Softmax, pa.Path):
        return
    yield "with base 2 for base e", _of_residuals(lambda x: x / 0.6931471805599453)
    yield "of the row before", _of_residuals(lambda x: rolled(x, 1))
    yield "left out", _of_residuals(lambda x: 0 * x)
    yield "spent by the first gradient", _spent


def _of_residuals(change: Callable[[Array], Array]) -> Change:
    def changed(call: Call) -> Call:
        return replace(call, residuals=tuple(map(change, call.residuals)))

    return handed(changed)


def _spent(truth: Truth, call: Call) -> Result:
    result = truth(call)
    for x in call.residuals:
        x[...] = 0
    return result


def value_between(m: pa.Mechanism, stage: str) -> Named:
    """What a mechanism done in one go keeps of the values between its leaves."""
    program = m.program
    if stage != BACKWARD:
        return
    kept = [call.out for call in program.calls if call.out != program.out]
    for i, name in enumerate(kept):
        yield f"{name} kept in bfloat16", handed(partial(_changed, i))
    if kept:
        yield "spent by the first gradient", _spent


def _changed(number: int, call: Call) -> Call:
    kept = [*call.residuals]
    kept[number] = to_bfloat16(kept[number])
    return replace(call, residuals=tuple(kept))
