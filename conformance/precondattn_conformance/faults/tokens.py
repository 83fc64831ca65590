"""Faults of gates, write strengths and directions that are misplaced by one token.

    e^{g_{t−1}} for e^{g_t},    β_{t+1} for β_t

`masks.py` and `heads.py` cover queries, keys and values.
"""

from __future__ import annotations

from functools import partial

from precondattn.algebra.piece import Piece
from precondattn.arrays import Array, namespace
from precondattn_conformance.faults.applicable import Named, looks_at_other_tokens
from precondattn_conformance.faults.fault import MethodCall, with_call


def placement(m: Piece, stage: str) -> Named:
    """Inputs other than rows, late or early by one token."""
    if not looks_at_other_tokens(m) and len(m.program.calls) == 1:
        return
    for name, pattern in m.inputs.items():
        if pattern.time_axis is None or pattern.is_rows or pattern.is_pairwise:
            continue
        for detail, by in (("before", 1), ("after", -1)):
            yield f"{name} of the token {detail}", with_call(partial(_moved, name, by))


def _moved(name: str, by: int, call: MethodCall) -> MethodCall:
    return call.with_inputs(**{name: rolled(call.inputs[name], by)})


def rolled(x: Array, by: int, axis: int = 1) -> Array:
    """x with its tokens moved by `by`; tokens moved past the end go to the start."""
    return namespace(x).roll(x, by, axis=axis)


OPERATORS = {"placement": placement}
