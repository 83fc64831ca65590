"""The coverage floor: what a backend promises to support.

    class Trsm(pa.Backend):
        covers = frozenset({"lucid_solve", "lucid_solve[beta=true]"})

A run fails if it requests a promised expression and none of its outputs is compared. A backend that
silently declines what it supported last week is no better than one that is wrong.
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
    """Expressions promised and requested, but never compared: a line each, with the reason."""
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
        f"below its floor: {backend} promises {name}, and supports none of it: "
        f"{reasons.get(name, 'not run')}"
        for name in sorted(missing)
    ]
