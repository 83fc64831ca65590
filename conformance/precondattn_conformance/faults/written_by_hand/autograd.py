"""Faults that only automatic differentiation shows: arrays detached from the graph."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from precondattn_conformance.faults.fault import FORWARD, STEP, Fault, MethodCall, with_call
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
    """All faults in this file, on PyTorch."""
    planted = [
        written(
            mechanism,
            FORWARD,
            f"{name} detached from the graph",
            with_call(partial(_without_input, name)),
            carrier="autograd",
            library="torch",
        )
        for mechanism, name in INPUTS.items()
    ]
    planted += [
        written(
            mechanism,
            STEP,
            f"the past {name} detached from the graph",
            with_call(partial(_without_state, name)),
            carrier="autograd",
            library="torch",
        )
        for mechanism, name in STATES.items()
    ]
    return planted


def _without_input(name: str, call: MethodCall) -> MethodCall:
    return call.given(**{name: call.inputs[name].detach()})


def _without_state(name: str, call: MethodCall) -> MethodCall:
    return replace(call, past={**call.past, name: call.past[name].detach()})
