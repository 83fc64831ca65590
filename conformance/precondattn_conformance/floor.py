"""The coverage floor: expressions that a backend promises to support.

    class Trsm(pa.Backend):
        covers = frozenset({"lucid_solve", "lucid_solve[beta=true]"})

A run fails if it requests a promised expression and none of its outputs is compared. So a backend
can not silently decline an expression that it supported before.
"""

from __future__ import annotations

from collections.abc import Iterable

import precondattn as pa
from precondattn.dispatch.discovery import discover
from precondattn_conformance.case import Case
from precondattn_conformance.runner import Outcome
from precondattn_conformance.status import COMPARED


def promised(backend: str | None) -> frozenset[str]:
    """The expressions that a backend promises to support."""
    if backend is None:
        return frozenset()
    return frozenset(str(pa.parse(text)) for text in discover().named(backend).covers)


def below_floor(
    backend: str | None, cases: Iterable[Case], outcomes: Iterable[Outcome]
) -> list[str]:
    """A line, with the reason, for each expression that is promised but was never compared."""
    requested = {case.mechanism for case in cases if case.check == "outputs"}
    missing = promised(backend) & requested
    reasons: dict[str, str] = {}
    for outcome in outcomes:
        if outcome.case.check == "outputs" and outcome.case.mechanism in missing:
            if outcome.status in COMPARED:
                missing = missing - {outcome.case.mechanism}
            else:
                reasons.setdefault(outcome.case.mechanism, outcome.reason)
    return [
        f"below its coverage floor: {backend} promises {name}, but no case of it was compared: "
        f"{reasons.get(name, 'not run')}"
        for name in sorted(missing)
    ]
