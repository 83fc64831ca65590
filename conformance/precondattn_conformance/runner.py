"""Running cases, and what comes of them."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from precondattn import UnsupportedError
from precondattn_conformance.case import Case
from precondattn_conformance.checks import Backend, DisagreementError, Measured, run

PASSED, FAILED, UNSUPPORTED = "passed", "failed", "unsupported"


@dataclass(frozen=True)
class Outcome:
    """What came of a case."""

    case: Case
    status: str
    measured: Measured | None = None
    reason: str = ""
    """The disagreement, the error, or the backend's own reason."""


@dataclass
class Report:
    """All outcomes of a run."""

    outcomes: list[Outcome] = field(default_factory=list)

    def count(self, status: str) -> int:
        return Counter(outcome.status for outcome in self.outcomes)[status]

    @property
    def is_good(self) -> bool:
        """Something was compared, and nothing disagreed."""
        return self.count(PASSED) > 0 and self.count(FAILED) == 0


def run_case(case: Case, backend: Backend = None, device: str | None = None) -> Outcome:
    """One case. Claiming support and then raising is a failure."""
    try:
        return Outcome(case, PASSED, run(case, backend, device))
    except UnsupportedError as refusal:
        return Outcome(case, UNSUPPORTED, reason=str(refusal))
    except DisagreementError as disagreement:
        return Outcome(case, FAILED, reason=str(disagreement))
    except Exception:
        return Outcome(case, FAILED, reason=traceback.format_exc(limit=-4))


def run_cases(
    cases: Iterable[Case],
    backend: Backend = None,
    device: str | None = None,
    progress: Callable[[Outcome], None] = lambda outcome: None,
) -> Report:
    """All cases, telling `progress` of each."""
    report = Report()
    for case in cases:
        outcome = run_case(case, backend, device)
        report.outcomes.append(outcome)
        progress(outcome)
    return report
