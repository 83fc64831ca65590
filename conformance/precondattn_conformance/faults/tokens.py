"""Faults of gates, write strengths and directions: misplaced by one token, or ignored.

    e^{g_{t−1}} for e^{g_t},    β_{t+1} for β_t,    λ = 0

`masks.py` and `heads.py` cover queries, keys and values.
"""

from __future__ import annotations

from functools import partial

import precondattn as pa
from precondattn.arrays import Array, namespace
from precondattn_conformance.faults.applicable import Named, looks_at_other_tokens
from precondattn_conformance.faults.fault import FORWARD, Call, with_call


def placement(m: pa.Mechanism, stage: str) -> Named:
    """Inputs other than rows, one token late or early."""
    if not looks_at_other_tokens(m) and len(m.program.calls) == 1:
        return
    for name, pattern in m.inputs.items():
        if pattern.time_axis is None or pattern.is_rows or pattern.is_pairwise:
            continue
        for detail, by in (("before", 1), ("after", -1)):
            yield f"{name} of the token {detail}", with_call(partial(_moved, name, by))


def left_out(m: pa.Mechanism, stage: str) -> Named:
    """Inputs other than rows, replaced by 1 where 0 is out of range, else by 0."""
    if stage != FORWARD:
        return
    for name, pattern in m.inputs.items():
        if not pattern.is_rows:
            excludes_0 = pattern.open_low or (pattern.low is not None and pattern.low > 0)
            yield f"of {name}", with_call(partial(_without, name, 1.0 if excludes_0 else 0.0))


def _without(name: str, value: float, call: Call) -> Call:
    return call.given(**{name: 0 * call.inputs[name] + value})


def _moved(name: str, by: int, call: Call) -> Call:
    return call.given(**{name: rolled(call.inputs[name], by)})


def rolled(x: Array, by: int, axis: int = 1) -> Array:
    """x with its tokens moved by `by`; the last become the first."""
    return namespace(x).roll(x, by, axis=axis)


OPERATORS = {"placement": placement, "neglect": left_out}
