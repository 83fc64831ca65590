"""The process of a row, which runs the cases and sends each outcome as soon as it is known.

A project is imported only here, so that it can not affect another run. Its output goes to a file,
whose last line says why a process died.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from precondattn_conformance.case import Case
from precondattn_conformance.conventions import needed
from precondattn_conformance.ecosystem.contenders import Contender
from precondattn_conformance.functions.backend import FunctionBackend
from precondattn_conformance.functions.diagnosis import diagnosis
from precondattn_conformance.promises import BROKEN
from precondattn_conformance.runner import Outcome, run_case
from precondattn_conformance.session import Session
from precondattn_conformance.status import FAILED


@dataclass(frozen=True)
class Started:
    """Message: a case has begun."""

    case: Case


@dataclass(frozen=True)
class Missing:
    """Message: the project, or something that it needs, is not installed."""

    reason: str


@dataclass(frozen=True)
class FinishedRow:
    """Message: all cases have run."""

    conventions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The conventions that were not kept and without which a case does not fail, by its id."""
    findings: tuple[str, ...] = ()
    """What the function computes instead (`functions/diagnosis.py`)."""


Message = Started | Outcome | Missing | FinishedRow


def serve(
    connection: Connection, contender: Contender, level: str, done: Collection[str], prints: str
) -> None:
    """Run the cases of a row, except those in `done`; printed output goes to the file `prints`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent decides when to stop.
    with open(prints, "ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    faulthandler.enable()
    del sys.argv[1:]  # A project may parse the command line.
    try:
        contender.version()
        name, backend = contender.ready()
    except (ImportError, TypeError) as error:
        connection.send(Missing(str(error)))
        return
    session = Session(
        backend=(name,),
        level=level,
        libraries=(contender.library,),
        mechanisms=(contender.mechanism,),
        jobs=0,
    )
    todo = [case for case in session.cases() if case.id not in done]
    outcomes = []
    for outcome in session.run(
        todo, session.expectations(todo), lambda case: connection.send(Started(case))
    ):
        connection.send(outcome)
        outcomes.append(outcome)
    if backend is None or not any(each.status == FAILED for each in outcomes):
        connection.send(FinishedRow())
        return
    findings = tuple(map(str, diagnosis(backend)))
    connection.send(FinishedRow(explained(session, backend, outcomes), findings))


def explained(
    session: Session, backend: FunctionBackend, outcomes: Sequence[Outcome]
) -> dict[str, tuple[str, ...]]:
    """The broken conventions without which a case does not fail, by the id of the case.

    A row first runs as if it kept every convention. If a small call shows that it does not keep one
    (`promises.py`), the failed cases that need it run again without the promise.
    """
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
