"""The coverage floor: what a backend promises to take.

    class Trsm(pa.Backend):
        covers = frozenset({"lucid_solve", "lucid_solve[beta=true]"})

A promised expression of which no output was compared in a run that asked for it is a failure: one
that quietly refuses what it took last week is no better than one that is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable

import precondattn as pa
from precondattn.dispatch.discovery import discover
from precondattn_conformance.case import Case
from precondattn_conformance.runner import Outcome
from precondattn_conformance.status import COMPARED


def promised(backend: str | None) -> frozenset[str]:
    """The expressions that a backend promises to take."""
    if backend is None:
        return frozenset()
    return frozenset(str(pa.parse(text)) for text in discover().named(backend).covers)


def below_floor(
    backend: str | None, cases: Iterable[Case], outcomes: Iterable[Outcome]
) -> list[str]:
    """What the backend promised, was asked for, and did not take: a line each, with its reason."""
    asked = {case.mechanism for case in cases if case.check == "outputs"}
    wanted = promised(backend) & asked
    reasons: dict[str, str] = {}
    for outcome in outcomes:
        if outcome.case.check == "outputs" and outcome.case.mechanism in wanted:
            if outcome.status in COMPARED:
                wanted = wanted - {outcome.case.mechanism}
            else:
                reasons.setdefault(outcome.case.mechanism, outcome.reason)
    return [
        f"{backend} promises {name}, and took nothing of it: {reasons.get(name, 'not run')}"
        for name in sorted(wanted)
    ]
