"""A run: its backends, its cases, the expectations, and the outcomes."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from precondattn.dispatch.discovery import discover
from precondattn_conformance.case import Case
from precondattn_conformance.cases import case_of, cases, known_cases
from precondattn_conformance.conventions import unpromised_by
from precondattn_conformance.declines import declared
from precondattn_conformance.design.levels import LEVELS
from precondattn_conformance.division import cases as division
from precondattn_conformance.division.run import run_divided
from precondattn_conformance.enough import CheckShare, shares
from precondattn_conformance.expectations import Expectations, name_of
from precondattn_conformance.isolation import TIMEOUT, run_isolated
from precondattn_conformance.promises import Promise, promises
from precondattn_conformance.runner import Outcome, run_case
from precondattn_conformance.source import Source
from precondattn_conformance.widest import is_narrow


@dataclass(frozen=True)
class Session:
    """The requested run, and what is derived from it."""

    backend: tuple[str, ...] = ()
    """The named backends, the one under test first; if empty, the default choice is tested."""
    level: str = "smoke"
    device: str | None = None
    libraries: tuple[str, ...] = ()
    mechanisms: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    """Ids of cases; if given, only these run."""
    xfail: str | Path | None = None
    skip: str | Path | None = None
    declines: tuple[str, ...] = ()
    """Parts that the backend under test declines on purpose, each as "part: why"."""
    timeout: float | None = None
    """Seconds for a case; None: the default."""
    jobs: int | None = None
    """The number of processes. None: one per core, or only one if a device is given. 0: the cases
    run in this process."""
    devices: int | None = None
    """The number of devices, if the run consists of cases with divided sequences."""
    source: Source | None = None
    """The source of the backend under test, if it is not installed."""
    inside: str | None = None
    """A context manager for the calls in the processes, as "module:function"."""

    @property
    def seconds(self) -> float:
        """The time limit in seconds for a case that a single process computes."""
        return self.timeout or TIMEOUT

    @property
    def under_test(self) -> str | None:
        return self.backend[0] if self.backend else None

    @property
    def blocks(self) -> tuple[int, ...]:
        """The sizes of blocks that the backend under test declares."""
        return tuple(discover().named(self.under_test).blocks) if self.under_test else ()

    @property
    def declared(self) -> dict[str, str]:
        """The reasons for which the backend under test declines parts on purpose, by part.

        Raises
        ------
        ValueError
            if a part is unknown or has no reason, or there is no backend under test.
        """
        if self.under_test is None:
            if self.declines:
                raise ValueError(f"--declines {self.declines[0]!r} needs a backend: --backend NAME")
            return {}
        of_backend = discover().named(self.under_test).declines
        return declared(of_backend) | declared(self.declines)

    @property
    def filters(self) -> dict[str, tuple[str, ...]]:
        """The filters on the level's cases, by the name of the option."""
        devices = () if self.devices is None else (str(self.devices),)
        return {
            "devices": devices,
            "library": self.libraries,
            "mechanism": self.mechanisms,
            "check": self.checks,
            "dtype": self.dtypes,
            "case": self.ids,
        }

    def cases(self) -> list[Case]:
        """The cases to run.

        Raises
        ------
        ValueError
            if a backend, a filter or a case does not exist.
        """
        for name in self.backend:
            discover().named(name)
        _ = self.declared  # Errors in it are raised before any case runs.
        if self.devices is not None:
            return self._divided(self.devices)
        if self.ids:
            return [case_of(text) for text in self.ids]
        chosen = cases(
            self.level,
            only_libraries=self.libraries,
            only_mechanisms=self.mechanisms,
            only_checks=self.checks,
            only_dtypes=self.dtypes,
            blocks=self.blocks,
            is_narrow=self.is_narrow,
            named=self.named,
            unpromised=unpromised_by(self.backend),
        )
        return list(chosen)

    @property
    def named(self) -> str:
        """What the run names: the less it names, the smaller a part of the cases it has."""
        if self.mechanisms:
            return "mechanism" if self.backend or self.libraries else "only a mechanism"
        return "library" if self.backend or self.libraries else ""

    def _divided(self, devices: int) -> list[Case]:
        """The cases of divided sequences."""
        for option, value in (("--device", self.device), ("--jobs", self.jobs)):
            if value is not None:
                raise ValueError(
                    f"{option} does not go with --devices: its processes run one call together, "
                    f"on the CPU; found {option} {value}"
                )
        chosen = division.divided_cases(
            devices,
            self.level,
            only_libraries=self.libraries,
            only_mechanisms=self.mechanisms,
            only_checks=self.checks,
            only_dtypes=self.dtypes,
        )
        if self.ids:
            return [division.case_of(text) for text in self.ids]
        return list(chosen)

    def is_narrow(self, expression: str, library: str) -> bool:
        """Whether cases in float64 run in float32, the widest dtype of the backend under test.

        False if only float64 is requested; then the backend gives its reason to decline.
        """
        if not self.backend or (self.dtypes and "float32" not in self.dtypes):
            return False
        return is_narrow(self.backend, expression, library, self.device)

    def promises(self, outcomes: Sequence[Outcome]) -> list[Promise]:
        """The conventions that the backend promises, and which hold; empty if no backend is named.

        Small calls are run for conventions that are not promised or on which a failure depends.
        """
        if self.under_test is None or self.devices is not None:
            return []
        return promises(self.backend, outcomes, self._tried)

    def _tried(self, cases: list[Case]) -> list[Outcome]:
        """The outcomes of cases without expectations."""
        backend = self.backend or None
        if self.jobs == 0:
            return [run_case(case, backend, self.device) for case in cases]
        return list(self._isolated(cases, expected=lambda outcome: True))

    def _isolated(self, cases: list[Case], **options: Any) -> Iterator[Outcome]:
        """The outcomes of cases in separate processes, with further options of `run_isolated`."""
        prepare = None if self.source is None else self.source.register
        backend, seconds = self.backend or None, self.seconds
        return run_isolated(
            cases, backend, self.device, timeout=seconds, prepare=prepare, **options
        )

    def shares(self, outcomes: Sequence[Outcome]) -> list[CheckShare]:
        """How much of each check was compared; empty without a backend or for given ids."""
        if not self.backend or self.ids or self.devices is not None:
            return []
        return shares(outcomes, self.declared, self.backend)

    def expectations(self, todo: list[Case]) -> Expectations:
        """The expectations of both files. Raises an error if a line matches no case."""
        expectations = Expectations.read(self.xfail, self.skip)
        names = expectations.mechanisms

        def is_wanted(expression: str) -> bool:
            return names is None or name_of(expression) in names

        others: Callable[[], Iterator[Case]]
        if self.devices is None:
            unpromised = unpromised_by(self.backend)
            others = partial(known_cases, self.blocks, is_wanted, self.is_narrow, unpromised)
        else:
            others = partial(division.divided_cases, self.devices, LEVELS[-1])
        expectations.require_true(_chained(todo, others))
        return expectations

    def run(
        self,
        todo: list[Case],
        expectations: Expectations,
        started: Callable[[Case], object] = lambda case: None,
    ) -> Generator[Outcome, None, None]:
        """Yield the outcomes as soon as each is known."""
        not_skipped = []
        for case in todo:
            skipped = expectations.skipped(case)
            if skipped is None:
                not_skipped.append(case)
            else:
                yield skipped
        backend = self.backend or None
        if self.devices is not None:
            for outcome in run_divided(
                not_skipped,
                self.devices,
                backend,
                timeout=self.timeout,
                inside=self.inside,
                started=started,
            ):
                yield expectations.judged(outcome)
            return
        if self.jobs == 0:
            for case in not_skipped:
                started(case)
                yield expectations.judged(run_case(case, backend, self.device))
            return
        jobs = self.jobs or (1 if self.device else os.cpu_count() or 1)
        is_quick = self.level == LEVELS[0] and not self.device
        expects = expectations.expects
        for outcome in self._isolated(
            not_skipped, jobs=jobs, is_quick=is_quick, started=started, expected=expects
        ):
            yield expectations.judged(outcome)


def _chained(first: list[Case], others: Callable[[], Iterator[Case]]) -> Iterator[Case]:
    """`first`, then `others`, which are generated only if they are needed."""
    yield from first
    yield from others()
