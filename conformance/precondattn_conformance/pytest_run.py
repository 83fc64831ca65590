"""The suite in pytest: a test for each case, which runs in a separate process.

`plugin.py` loads this module if a flag is given. With pytest-xdist each worker has such a process,
and the main process collects the outcomes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial

import pytest

from precondattn.json_types import JsonObject
from precondattn_conformance.alone import Alone
from precondattn_conformance.case import Case
from precondattn_conformance.cases import case_of
from precondattn_conformance.checks.check import Measured
from precondattn_conformance.enough import CheckShare, below_floor, too_little
from precondattn_conformance.isolation import Worker
from precondattn_conformance.promises import BROKEN, UNPROMISED, Promise
from precondattn_conformance.report.page import write_page
from precondattn_conformance.report.record import RecordWriter
from precondattn_conformance.runner import Outcome, run_case
from precondattn_conformance.session import Session
from precondattn_conformance.status import COMPARED, OUTCOME


class PytestRun:
    """A run of pytest that includes the suite."""

    def __init__(self, session: Session, record: str | None, html: str | None) -> None:
        self.session, self.html = session, html
        try:
            self.todo = session.cases()
            self.expectations = session.expectations(self.todo)
        except (ValueError, TypeError, OSError) as error:
            raise pytest.UsageError(str(error)) from None
        self.outcomes: list[Outcome] = []
        self.below: list[str] = []
        self.promises: list[Promise] = []
        self.shares: list[CheckShare] = []
        self.recording = RecordWriter(
            record,
            backends=session.backend,
            level=session.level,
            device=session.device,
            filters=session.filters,
        )

    @contextmanager
    def runner(self) -> Iterator[Callable[[Case], Outcome]]:
        """A function that runs a case in a process, which exists in this context."""
        session, backend = self.session, self.session.backend or None
        beside = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
        worker = None
        if session.jobs != 0:
            start = partial(Worker, backend, session.device, session.seconds, beside)
            worker, alone = start(), Alone(start, backend, session.device)

        def run(case: Case) -> Outcome:
            skipped = self.expectations.skipped(case)
            if skipped is not None:
                return skipped
            if worker is None:
                outcome = run_case(case, backend, session.device)
            else:
                outcome = worker.run(case)
                if not self.expectations.expects(outcome):
                    outcome = alone.judged(outcome, worker.earlier)
            return self.expectations.judged(outcome)

        try:
            yield run
        finally:
            if worker is not None:
                worker.stop()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "precondattn_case" in metafunc.fixturenames:
            ids = [case.id for case in self.todo]
            metafunc.parametrize("precondattn_case", self.todo, ids=ids)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the outcome to the report of its test."""
        report = yield
        outcome = getattr(item, OUTCOME, None)
        if call.when == "call" and outcome is not None:
            setattr(report, OUTCOME, _plain(outcome))
            if outcome.measured is not None:
                report.user_properties += [
                    ("error", repr(outcome.measured.error)),
                    ("bound", repr(outcome.measured.bound)),
                ]
        return report

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        if not _is_worker(session.config):
            try:
                self.recording.__enter__()
            except ValueError as error:
                raise pytest.UsageError(str(error)) from None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        plain = getattr(report, OUTCOME, None)
        if plain is not None:
            outcome = _outcome(plain)
            self.outcomes.append(outcome)
            self.recording.add(outcome)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the run of a named backend if nothing was compared."""
        config = session.config
        if _is_worker(config) or config.option.collectonly:
            return
        is_whole = len(self.outcomes) == len(self.todo)
        self.promises = self.session.promises(self.outcomes)
        if is_whole:
            self.shares = self.session.shares(self.outcomes)
        self.recording.summarize(self.promises, self.shares)
        self.recording.close(complete=is_whole)
        if self.html is not None:
            write_page(self.recording.record, self.html)
        if is_whole:
            self.below = below_floor(self.session.under_test, self.todo, self.outcomes)
            self.below += too_little(self.shares)
        if self.session.backend and (self.below or not self._compared()):
            session.exitstatus = 1

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        if self.session.backend and not config.option.collectonly:
            names = ", ".join(self.session.backend)
            terminalreporter.write_line(f"{names}: {self._compared()} cases compared")
            for promise in self.promises:
                if promise.verdict in (BROKEN, UNPROMISED):
                    terminalreporter.write_line(str(promise))
            for share in self.shares:
                if share.compared < share.total:
                    terminalreporter.write_line(str(share))
            for line in self.below:
                terminalreporter.write_line(line)

    def _compared(self) -> int:
        return sum(outcome.status in COMPARED for outcome in self.outcomes)


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _plain(outcome: Outcome) -> JsonObject:
    """The outcome as plain data, which pytest-xdist sends between processes."""
    return {**asdict(outcome), "case": outcome.case.id}


def _outcome(plain: JsonObject) -> Outcome:
    measured = plain["measured"]
    return Outcome(
        **{
            **plain,
            "case": case_of(plain["case"]),
            "measured": None if measured is None else Measured(**measured),
            "after": tuple(plain["after"]),
        }
    )
