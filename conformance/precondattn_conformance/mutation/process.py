"""The process in which mutants run, one after another.

It is started once, so that imports, the oracle's results and compiled kernels are kept. It is
replaced if a mutant hangs where Python can not interrupt it, ends the process, or has lasting side
effects.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from precondattn_conformance.case import Case
from precondattn_conformance.checks.check import Backend
from precondattn_conformance.cores import shared_by
from precondattn_conformance.mutation.mutant import Mutant
from precondattn_conformance.mutation.target import Target
from precondattn_conformance.mutation.trial import (
    KILLED,
    TIMEOUT,
    Baseline,
    MutantVerdict,
    MutationTrial,
    SpoiltError,
)

STARTING = 120.0
"""Time limit in seconds for imports."""
GRACE = 20.0
"""Seconds after a time limit until the process is ended."""
MEMORY = 12 << 30
"""Bytes of address space that a mutant may use in addition to the process before it."""


Message = Any
"""A message from a process: a `Baseline`, a `MutantVerdict`, or an error."""


class Setting(NamedTuple):
    """The start-up arguments of a process."""

    targets: tuple[Target, ...]
    backend: Backend
    device: str | None
    inside: str | None


class MutationProcess:
    """A process with a `MutationTrial`."""

    def __init__(self, setting: Setting, beside: int = 1) -> None:
        """`beside` is the number of processes that share the cores."""
        self.setting, self.beside = setting, beside
        self.process: BaseProcess | None = None

    def _started(self) -> None:
        if self.process is not None:
            return
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.setting), daemon=True)
        with shared_by(self.beside):
            self.process.start()
        theirs.close()
        self._received(STARTING)

    def _received(self, limit: float) -> Message:
        """The next message.

        Raises
        ------
        TimeoutError, EOFError
            if no message comes in time, or the process has ended.
        ValueError
            with the process's message, if its setting is wrong.
        """
        if not self.connection.poll(limit):
            raise TimeoutError
        message = self.connection.recv()
        if isinstance(message, ValueError):
            raise message
        return message

    def baseline(self, case: Case, limit: float) -> Baseline:
        """The result of a case on the unchanged code."""
        self._started()
        self.connection.send((case, limit))
        try:
            result: Baseline = self._received(2 * limit + GRACE)
        except (TimeoutError, EOFError, ConnectionResetError):
            self.stop()
            return Baseline(case, "hung", limit)
        return result

    def verdict(self, mutant: Mutant, cases: Sequence[tuple[Case, float]]) -> MutantVerdict:
        """Run a mutant; repeat it in a new process if an earlier one affected the first."""
        try:
            return self._verdict(mutant, cases)
        except SpoiltError:
            self.stop()
        try:
            return self._verdict(mutant, cases)
        except SpoiltError as error:
            # The mutant itself has lasting side effects, so it counts as detected.
            self.stop()
            return MutantVerdict(KILLED, reason=str(error))

    def _verdict(self, mutant: Mutant, cases: Sequence[tuple[Case, float]]) -> MutantVerdict:
        self._started()
        self.connection.send((mutant, tuple(cases)))
        at, limit = "", GRACE
        try:
            while True:
                message = self._received(limit + GRACE)
                if isinstance(message, SpoiltError):
                    raise message
                if isinstance(message, MutantVerdict):
                    return message
                at, limit = message
        except TimeoutError:
            self.stop()
            return MutantVerdict(TIMEOUT, at, f"the process had to be ended after {limit:.0f} s")
        except (EOFError, ConnectionResetError):
            self.stop()
            return MutantVerdict(KILLED, at, "the process died")

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.connection.close()
            self.process = None


def _serve(connection: Connection, setting: Setting) -> None:
    """The main loop of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent decides when to stop.
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    with tempfile.TemporaryDirectory(prefix="precondattn-mutants-") as folder:
        try:
            trial = MutationTrial(*setting, Path(folder))
        except Exception as error:
            connection.send(ValueError(str(error)))
            return
        connection.send(None)
        _limit_memory()
        while True:
            try:
                first, second = connection.recv()
            except EOFError:
                return
            if isinstance(first, Case):
                connection.send(trial.baseline(first, second))
                continue
            try:
                connection.send(
                    trial.verdict(
                        first, second, lambda case, limit: connection.send((case.id, limit))
                    )
                )
            except SpoiltError as error:
                connection.send(error)


def _limit_memory() -> None:
    """Limit memory, so that a mutant that allocates without end raises a MemoryError."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return  # Only Linux reports the memory in use.
    used = pages * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
