"""A run: which cases, of which backend, what is expected of them, and what comes of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precondattn.dispatch.discovery import discover
from precondattn_conformance.case import Case
from precondattn_conformance.cases import case_of, cases, known_cases
from precondattn_conformance.expectations import Expectations
from precondattn_conformance.isolation import TIMEOUT, run_isolated
from precondattn_conformance.runner import Outcome, run_case


@dataclass(frozen=True)
class Session:
    """What was asked for."""

    backend: tuple[str, ...] = ()
    """Those named, the one under test first; none means whatever is chosen by default."""
    level: str = "smoke"
    device: str | None = None
    libraries: tuple[str, ...] = ()
    mechanisms: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    """These cases alone."""
    xfail: str | Path | None = None
    skip: str | Path | None = None
    timeout: float = TIMEOUT
    jobs: int | None = None
    """Processes; None is one for each core, and one on a device. 0 runs all in this process."""

    @property
    def under_test(self) -> str | None:
        return self.backend[0] if self.backend else None

    @property
    def filters(self) -> dict[str, tuple[str, ...]]:
        """What was chosen of the level's cases."""
        return {
            "library": self.libraries,
            "mechanism": self.mechanisms,
            "check": self.checks,
            "dtype": self.dtypes,
            "case": self.ids,
        }

    def cases(self) -> list[Case]:
        """Those to run.

        Raises
        ------
        ValueError
            for a backend, a filter or a case that does not exist.
        """
        for name in self.backend:
            discover().named(name)
        if self.ids:
            return [case_of(text) for text in self.ids]
        chosen = cases(
            self.level,
            only_libraries=self.libraries,
            only_mechanisms=self.mechanisms,
            only_checks=self.checks,
            only_dtypes=self.dtypes,
        )
        return list(chosen)

    def expectations(self, todo: list[Case]) -> Expectations:
        """From the files, once each of their lines has been seen to mean something."""
        found = Expectations.read(self.xfail, self.skip)
        found.require_true(_one_after_the_other(todo, known_cases))
        return found

    def run(
        self,
        todo: list[Case],
        expectations: Expectations,
        started: Callable[[Case], Any] = lambda case: None,
    ) -> Iterator[Outcome]:
        """The outcomes as they come."""
        left = []
        for case in todo:
            skipped = expectations.skipped(case)
            if skipped is None:
                left.append(case)
            else:
                yield skipped
        backend = self.backend or None
        if self.jobs == 0:
            for case in left:
                started(case)
                yield expectations.judged(run_case(case, backend, self.device))
            return
        jobs = self.jobs or (1 if self.device else os.cpu_count() or 1)
        for outcome in run_isolated(
            left, backend, self.device, timeout=self.timeout, jobs=jobs, started=started
        ):
            yield expectations.judged(outcome)


def _one_after_the_other(first: list[Case], then: Callable[[], Iterator[Case]]) -> Iterator[Case]:
    yield from first
    yield from then()
