"""Finds failures due to a convention: without the promise, the case is right or not run.

A row first runs as if it kept every convention. If a small call shows that it does not keep one
(`promises.py`), the failed cases that need this convention run again without it.
"""

from __future__ import annotations

from collections.abc import Sequence

from precondattn_conformance.conventions import needed
from precondattn_conformance.functions.backend import FunctionBackend
from precondattn_conformance.promises import BROKEN
from precondattn_conformance.runner import Outcome, run_case
from precondattn_conformance.session import Session
from precondattn_conformance.status import FAILED


def explained(
    session: Session, backend: FunctionBackend, outcomes: Sequence[Outcome]
) -> dict[str, tuple[str, ...]]:
    """The broken conventions without which a case does not fail, by the id of the case."""
    broken = {each.convention for each in session.promises(outcomes) if each.verdict == BROKEN}
    found = {}
    promised = backend.promises
    backend.promises = promised - broken
    try:
        for failure in (each for each in outcomes if each.status == FAILED):
            why = sorted(broken & needed(failure.case))
            if why and run_case(failure.case, backend.name).status != FAILED:
                found[failure.case.id] = tuple(why)
    finally:
        backend.promises = promised
    return found
