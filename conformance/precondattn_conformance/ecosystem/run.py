"""Runs rows in separate processes, several at once, each with a time limit.

    for contender, ran in run_all(contenders("fla/*"), "smoke", jobs=2): …

If a process dies, the case that it was running has failed, and another process continues after it.
If the time limit is reached, the running case has failed, and later cases are not compared.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

from precondattn_conformance.case import Case
from precondattn_conformance.ecosystem.contenders import Contender
from precondattn_conformance.ecosystem.process import FinishedRow, Message, Missing, Started, serve
from precondattn_conformance.isolation import cause
from precondattn_conformance.process_settings import compiling_quickly, shared_by
from precondattn_conformance.runner import Outcome
from precondattn_conformance.status import FAILED

SECONDS = 300.0
"""The time limit in seconds for a row at the level smoke."""

STARTS = 4
"""The largest number of processes of a row: each but the last has died."""


@dataclass
class Ran:
    """The result of running a row."""

    outcomes: list[Outcome] = field(default_factory=list)
    conventions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    findings: tuple[str, ...] = ()
    missing: str = ""
    """The reason why nothing, or nothing more, was compared."""
    seconds: float = 0.0


def run_all(
    rows: Iterable[Contender], level: str, *, jobs: int = 2, seconds: float = SECONDS
) -> Iterator[tuple[Contender, Ran]]:
    """Yield the result of each row as soon as it is known."""
    todo = deque(rows)
    running: list[_Row] = []
    try:
        while todo or running:
            while todo and len(running) < jobs:
                running.append(_Row(todo.popleft(), level, jobs, seconds))
            left = min(row.deadline for row in running) - time.monotonic()
            ready = wait([row.connection for row in running], max(left, 0))
            for row in running:
                if row.connection in ready:
                    row.receive()
                elif time.monotonic() > row.deadline:
                    row.give_up()
            for row in [each for each in running if each.is_over]:
                running.remove(row)
                yield row.contender, row.ran
    finally:
        for row in running:
            row.stop()


class _Row:
    """A row that is running."""

    def __init__(self, contender: Contender, level: str, beside: int, seconds: float) -> None:
        self.contender, self.level, self.beside, self.limit = contender, level, beside, seconds
        self.ran = Ran()
        self.since = time.monotonic()
        self.deadline = self.since + seconds
        self.starts = 0
        self.is_over = False
        self._start()

    def _start(self) -> None:
        self.starts += 1
        self.case: Case | None = None
        self.prints = tempfile.NamedTemporaryFile(prefix="precondattn-")  # noqa: SIM115
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        done = frozenset(outcome.case.id for outcome in self.ran.outcomes)
        arguments = (theirs, self.contender, self.level, done, self.prints.name)
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        with shared_by(self.beside), compiling_quickly():
            self.process.start()
        theirs.close()

    def receive(self) -> None:
        """Receive the next message, or notice that the process has died."""
        try:
            message: Message = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._died()
            return
        match message:
            case Started(case):
                self.case = case
            case Outcome():
                self.ran.outcomes.append(message)
                self.case = None
            case Missing(reason):
                self._end(reason)
            case FinishedRow(conventions, findings):
                self.ran.conventions, self.ran.findings = conventions, findings
                self._end()

    def _died(self) -> None:
        self.process.join()
        text = Path(self.prints.name).read_text(errors="replace").strip()
        last = text.rpartition("\n")[2] if self.process.exitcode == 1 else ""
        reason = f"the process died of {cause(self.process.exitcode)}" + (last and f": {last}")
        if self.case is None or self.starts == STARTS:
            self._failed(reason)
            self._end(reason)
            return
        self._failed(reason)
        self.stop()
        self._start()

    def give_up(self) -> None:
        """End a row that has reached its time limit."""
        reason = f"no result after {self.limit:g} s"
        self._failed(f"it hung: {reason}")
        self._end(reason)

    def _failed(self, reason: str) -> None:
        """Record that the running case has failed."""
        if self.case is not None:
            self.ran.outcomes.append(Outcome(self.case, FAILED, reason=reason))

    def _end(self, missing: str = "") -> None:
        self.ran.missing = missing
        self.ran.seconds = time.monotonic() - self.since
        self.is_over = True
        self.stop()

    def stop(self) -> None:
        """End the process, which may be hanging."""
        self.connection.close()
        self.process.kill()
        self.process.join()
        self.prints.close()
