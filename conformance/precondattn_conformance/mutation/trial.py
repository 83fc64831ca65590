"""Runs the unchanged code and its mutants in this process.

A mutant is killed if a case that passes on the unchanged code does not pass: its result is wrong,
it raises, it declines, or it takes far longer. The case is then repeated on the unchanged code. If
that fails too, the mutant has had lasting side effects: the process has to be replaced, and the
kill does not count.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from precondattn_conformance import oracle
from precondattn_conformance.case import Case
from precondattn_conformance.checks.check import Backend
from precondattn_conformance.inside import context_manager
from precondattn_conformance.mutation.copied import CopyPlanter
from precondattn_conformance.mutation.limit import TimeLimitError, time_limit
from precondattn_conformance.mutation.mutant import Mutant
from precondattn_conformance.mutation.planting import NotPlantedError, Planter
from precondattn_conformance.mutation.target import Target
from precondattn_conformance.mutation.touched import touched
from precondattn_conformance.runner import run_case
from precondattn_conformance.status import PASSED

KILLED, SURVIVED, TIMEOUT, INVALID, UNTOUCHED = (
    "killed",
    "survived",
    "timeout",
    "invalid",
    "untouched",
)
BROKEN = "#error\n"
"""Text at the start of a CUDA file that prevents compilation: every case that uses it fails."""


class SpoiltError(RuntimeError):
    """Raised if a case that had passed fails on the unchanged code after a mutant has run."""


@dataclass(frozen=True)
class Baseline:
    """The result of a case on the unchanged code."""

    case: Case
    status: str
    seconds: float
    lines: frozenset[tuple[str, int]] = frozenset()
    """The target and number of each line that it executes; for CUDA, line 0 if it uses the file."""


@dataclass(frozen=True)
class MutantVerdict:
    """The result of a mutant."""

    status: str
    case: str = ""
    """The case that killed it."""
    reason: str = ""
    cases: int = 0
    """The number of cases that ran."""


class MutationTrial:
    """The targets in this process, and the backend under test."""

    def __init__(
        self,
        targets: Sequence[Target],
        backend: Backend,
        device: str | None,
        inside: str | None,
        folder: Path,
    ) -> None:
        """`folder` is an empty folder for copies of packages."""
        warnings.simplefilter("ignore")  # A mutant's nonsense results may overflow.
        self.backend, self.device = backend, device
        self.texts = {t.name: CopyPlanter(t, folder) for t in targets if t.is_cuda}
        modules = {t: importlib.import_module(t.name) for t in targets if not t.is_cuda}
        self.functions = {t.name: Planter(t, module) for t, module in modules.items()}
        self.name_of = {planter.file: name for name, planter in self.functions.items()}
        self.inside = context_manager(inside) if inside else nullcontext
        oracle.keep_all()

    def baseline(self, case: Case, limit: float) -> Baseline:
        """Run a case on the unchanged code, and record which lines of the targets it executes."""
        with self.inside():
            try:
                with time_limit(limit), touched(self.name_of) as lines:
                    outcome = run_case(case, self.backend, self.device)
            except TimeLimitError:
                return Baseline(case, TIMEOUT, limit)
            used = {(self.name_of[file], line) for file, line in lines}
            if outcome.status == PASSED:
                used |= {(name, 0) for name in self.texts if self._needs(name, case)}
        return Baseline(case, outcome.status, outcome.seconds, frozenset(used))

    def _needs(self, name: str, case: Case) -> bool:
        planter = self.texts[name]
        with planter.written(BROKEN + planter.text):
            return bool(run_case(case, self.backend, self.device).status != PASSED)

    def verdict(
        self,
        mutant: Mutant,
        cases: Sequence[tuple[Case, float]],
        started: Callable[[Case, float], object] = lambda case, limit: None,
    ) -> MutantVerdict:
        """Run cases on a mutant until one fails; each comes with its limit in seconds.

        Raises
        ------
        SpoiltError
            if the case that failed also fails on the unchanged code now.
        """
        if not cases:
            return MutantVerdict(UNTOUCHED)
        planter: Planter | CopyPlanter = (self.functions | self.texts)[mutant.target]
        found, last = MutantVerdict(SURVIVED, cases=len(cases)), cases[0]
        with self.inside():
            try:
                with planter.planted(mutant):
                    for number, last in enumerate(cases, 1):
                        started(*last)
                        status, reason = self._outcome(*last)
                        if status is not None:
                            found = MutantVerdict(status, last[0].id, reason, number)
                            break
            except NotPlantedError as error:
                return MutantVerdict(INVALID, reason=str(error))
            if found.status != SURVIVED:
                started(*last)
                if self._outcome(*last)[0] is not None:
                    raise SpoiltError(f"{last[0].id} fails after the mutant {mutant.key}")
        return found

    def _outcome(self, case: Case, limit: float) -> tuple[str | None, str]:
        """KILLED or TIMEOUT with a reason; None if the case passes."""
        try:
            with time_limit(limit):
                outcome = run_case(case, self.backend, self.device)
        except TimeLimitError:
            return TIMEOUT, f"no result after {limit:.0f} s"
        except SystemExit as error:
            return KILLED, f"it raised {error!r}"
        if outcome.status == PASSED:
            return None, ""
        return KILLED, str(outcome.reason).partition("\n")[0]
