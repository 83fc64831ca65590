"""Runs cases in this process, and defines their outcomes."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from precondattn import UnsupportedError
from precondattn_conformance.case import Case
from precondattn_conformance.checks import run
from precondattn_conformance.checks.check import Backend, Measured, NotRunError
from precondattn_conformance.disagreement import DisagreementError
from precondattn_conformance.snippet import snippet
from precondattn_conformance.status import FAILED, PASSED, SKIPPED, UNSUPPORTED


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case."""

    case: Case
    status: str
    measured: Measured | None = None
    reason: str = ""
    """The disagreement, the error, or the backend's reason for declining."""
    details: str = ""
    """Details of a failure: the first wrong element, a map of the error, a traceback."""
    snippet: str = ""
    """Python code that reproduces a failure."""
    seconds: float = 0.0
    hung: bool = False
    verb: str = ""
    """The verb of the call, for a declined case."""
    alone: str = ""
    """The status of a failed case when it was replayed alone in a new process."""
    after: tuple[str, ...] = ()
    """The ids of the earlier cases after which the case fails, if it passes alone."""

    @property
    def text(self) -> str:
        """All information on a failure as text."""
        parts = (self.reason, self.details, self.snippet and f"To reproduce it:\n\n{self.snippet}")
        return "\n\n".join(part for part in parts if part)


@dataclass
class Report:
    """All outcomes of a run."""

    outcomes: list[Outcome] = field(default_factory=list)

    def put_in_order(self, cases: Iterable[Case]) -> None:
        """Sort the outcomes into the order of the cases, from which several processes deviate."""
        position = {case.id: number for number, case in enumerate(cases)}
        self.outcomes.sort(key=lambda outcome: position[outcome.case.id])

    def count(self, status: str) -> int:
        return Counter(outcome.status for outcome in self.outcomes)[status]

    @property
    def is_good(self) -> bool:
        """Whether something was compared, and nothing failed."""
        return self.count(PASSED) > 0 and self.count(FAILED) == 0


def run_case(case: Case, backend: Backend = None, device: str | None = None) -> Outcome:
    """Run one case. A backend that claims support and then raises an error has failed."""
    start = time.perf_counter()

    def outcome(
        status: str,
        measured: Measured | None = None,
        reason: str = "",
        details: str = "",
        error: DisagreementError | None = None,
    ) -> Outcome:
        code = snippet(case, backend, device, error) if status == FAILED else ""
        seconds = time.perf_counter() - start
        return Outcome(case, status, measured, reason, details, code, seconds)

    try:
        return outcome(PASSED, run(case, backend, device))
    except UnsupportedError as refusal:
        verb = "" if refusal.request is None else refusal.request.verb
        return replace(outcome(UNSUPPORTED, None, str(refusal)), verb=verb)
    except NotRunError as obstacle:
        return outcome(SKIPPED, None, str(obstacle))
    except DisagreementError as disagreement:
        measured = None
        if disagreement.error is not None and disagreement.bound is not None:
            measured = Measured(disagreement.error, disagreement.bound)
        return outcome(FAILED, measured, str(disagreement), disagreement.details, disagreement)
    except Exception as error:
        reason = f"it raised {type(error).__name__}: {error}"
        return outcome(FAILED, None, reason, traceback.format_exc(limit=-4))
