"""Faults that only a framework's automatic differentiation shows: what it is not told of."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from precondattn_conformance.faults.fault import FORWARD, STEP, Call, Fault, handed
from precondattn_conformance.faults.written_by_hand.written import written

INPUTS = {
    "softmax": "k",
    "path": "w",
    "lucid_solve": "k",
    "gated_delta": "g",
    "conditioned_query": "contraction",
    "unit_rows[detach=false]": "o",
}
STATES = {"gated_delta": "state", "gsa": "keys", "conditioned_query": "first"}


def faults() -> list[Fault]:
    """All of them, on PyTorch."""
    found = [
        written(
            mechanism,
            FORWARD,
            f"{name} cut from the graph",
            handed(partial(_without_input, name)),
            carrier="autograd",
            library="torch",
        )
        for mechanism, name in INPUTS.items()
    ]
    found += [
        written(
            mechanism,
            STEP,
            f"the past {name} cut from the graph",
            handed(partial(_without_state, name)),
            carrier="autograd",
            library="torch",
        )
        for mechanism, name in STATES.items()
    ]
    return found


def _without_input(name: str, call: Call) -> Call:
    return call.given(**{name: call.inputs[name].detach()})


def _without_state(name: str, call: Call) -> Call:
    return replace(call, past={**call.past, name: call.past[name].detach()})
