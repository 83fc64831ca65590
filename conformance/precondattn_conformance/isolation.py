"""Runs cases in separate processes: a hang or crash is one failure, and other cases still run.

    for outcome in run_isolated(cases, "trsm", timeout=120, jobs=2): …

A process runs all cases of one mechanism in one dtype, one at a time, since they share the oracle's
results. With several processes, the first begins with the cases of JAX and another with those of
all other libraries. So each function is compiled once, and each process imports only what it needs.
A process that has finished its kind of cases continues with the other kind. A process that dies or
hangs is replaced, and the case that it was running has failed. The first failures are replayed
alone (`alone.py`).
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import groupby
from multiprocessing.connection import Connection, wait

from precondattn_conformance.alone import Alone
from precondattn_conformance.case import Case
from precondattn_conformance.checks.check import Backend
from precondattn_conformance.libraries import named
from precondattn_conformance.process_settings import compiling_quickly, shared_by
from precondattn_conformance.runner import Outcome, run_case
from precondattn_conformance.snippet import snippet
from precondattn_conformance.status import FAILED

TIMEOUT = 300.0
"""Seconds for one case, including a kernel's first compilation."""
BEFORE_KILLING = 2.0
"""Seconds before the time limit at which a hanging process writes its traceback."""

TO_END = 10.0
"""Seconds that an idle process has to end by itself."""


Lane = deque[list[Case]]
"""Groups of cases of one mechanism and dtype."""
Prepare = Callable[[], object]
"""A function that a process calls before its first case; it can be pickled."""


class Worker:
    """A process that runs cases, and its state."""

    def __init__(
        self,
        backend: Backend,
        device: str | None,
        timeout: float,
        beside: int = 1,
        *,
        is_quick: bool = False,
        prepare: Prepare | None = None,
    ) -> None:
        """`beside` is the number of processes that share the cores.

        If it `is_quick`, JAX compiles without optimisations. The process calls `prepare` first.
        """
        self.backend, self.device, self.timeout, self.beside = backend, device, timeout, beside
        self.is_quick, self.prepare = is_quick, prepare
        self.lanes: tuple[Lane, ...] = ()
        """The remaining cases. The next group is taken from the first lane that has any."""
        self.todo: deque[Case] = deque()
        self.earlier: tuple[Case, ...] = ()
        """The cases that the process ran before the last one."""
        self.running: Case | None = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.traces = tempfile.NamedTemporaryFile(prefix="precondattn-")  # noqa: SIM115
        arguments = (
            *(theirs, self.backend, self.device, self.timeout, self.traces.name),
            self.prepare,
        )
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        quickly = compiling_quickly() if self.is_quick else nullcontext()
        with shared_by(self.beside), quickly:
            self.process.start()
        theirs.close()
        self.done: tuple[Case, ...] = ()
        self.is_started = False

    def begin(self) -> Case | None:
        """Send the next case to the process."""
        if not self.todo:
            lane = next(filter(None, self.lanes), None)
            self.todo.extend(lane.popleft() if lane else ())
        self.running = self.todo.popleft() if self.todo else None
        if self.running is not None:
            self._wait_until_started()
            self.since, self.earlier = time.monotonic(), self.done
            with suppress(BrokenPipeError):  # A process that has died is reported by `receive`.
                self.connection.send(self.running)
        return self.running

    def _wait_until_started(self) -> None:
        """Wait for the process to start, so that imports do not count as time of the first case."""
        if self.is_started:
            return
        if not self.connection.poll(TIMEOUT):
            raise RuntimeError(f"a process for the cases did not start in {TIMEOUT:g} s")
        with suppress(EOFError, ConnectionResetError):
            self.connection.recv()
        self.is_started = True

    def run(self, case: Case) -> Outcome:
        """Run one case and wait for its outcome."""
        self.todo.append(case)
        self.begin()
        outcome = self.receive() if self.connection.poll(self.timeout) else self.hung()
        self.running = None
        return outcome

    @property
    def deadline(self) -> float:
        return self.since + self.timeout

    def receive(self) -> Outcome:
        """The outcome of the running case, even if the process has died."""
        case = self.running
        assert case is not None
        try:
            outcome: Outcome = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            return self._lost(case, f"the process died of {cause(self.process.exitcode)}")
        self.done = (*self.done, case)
        return outcome

    def hung(self) -> Outcome:
        """The outcome of a case that reached the time limit."""
        assert self.running is not None
        reason = f"it hung: no result after {self.timeout:g} s"
        return replace(self._lost(self.running, reason), hung=True)

    def _lost(self, case: Case, reason: str) -> Outcome:
        trace = self.traces.read().decode(errors="replace").strip()
        seconds = time.monotonic() - self.since
        self.stop()
        self._start()
        text = snippet(case, self.backend, self.device)
        return Outcome(case, FAILED, None, reason, trace, text, seconds)

    def stop(self) -> None:
        """End the process: let it return, so that libraries release resources, or kill it."""
        self.connection.close()  # The process then receives no more cases, and returns.
        if self.running is None:
            self.process.join(TO_END)
        self.process.kill()
        self.process.join()
        self.traces.close()


def cause(exitcode: int | None) -> str:
    """The cause of a process's death: a signal's name or an exit code."""
    if exitcode is not None and exitcode < 0:
        return signal.Signals(-exitcode).name
    return f"exit code {exitcode}"


def _serve(
    connection: Connection,
    backend: Backend,
    device: str | None,
    timeout: float,
    traces: str,
    prepare: Prepare | None,
) -> None:
    """The main loop of the process: receive a case, send its outcome."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent decides when to stop.
    with open(traces, "w", encoding="utf-8") as file:
        faulthandler.enable(file)
        if prepare is not None:
            prepare()
        connection.send("started")
        while True:
            try:
                case = connection.recv()
            except EOFError:
                return
            faulthandler.dump_traceback_later(max(timeout - BEFORE_KILLING, 0.1), file=file)
            outcome = run_case(case, backend, device)
            faulthandler.cancel_dump_traceback_later()
            connection.send(outcome)


def run_isolated(
    cases: Iterable[Case],
    backend: Backend = None,
    device: str | None = None,
    *,
    timeout: float = TIMEOUT,
    jobs: int = 1,
    is_quick: bool = False,
    prepare: Prepare | None = None,
    started: Callable[[Case], object] = lambda case: None,
    expected: Callable[[Outcome], bool] = lambda outcome: False,
) -> Iterator[Outcome]:
    """Yield outcomes as soon as each is known; with several jobs, not in the order of the cases.

    Failures that are not `expected` are replayed alone. If it `is_quick`, JAX compiles without
    optimisations. Each process calls `prepare` first.
    """
    lanes = lanes_of(cases, jobs)
    count = min(jobs, sum(map(len, lanes)))

    def start() -> Worker:
        return Worker(backend, device, timeout, count, is_quick=is_quick, prepare=prepare)

    workers = [start() for _ in range(count)]
    for worker in workers:
        worker.lanes = lanes[::-1] if worker is workers[0] else lanes
    alone = Alone(start, backend, device)

    def begin_next(worker: Worker) -> None:
        case = worker.begin()
        if case is not None:
            started(case)

    def looked_at(worker: Worker, outcome: Outcome) -> Outcome:
        return outcome if expected(outcome) else alone.judged(outcome, worker.earlier)

    try:
        for worker in workers:
            begin_next(worker)
        while busy := {w.connection: w for w in workers if w.running is not None}:
            until = min(worker.deadline for worker in busy.values())
            ready = wait(list(busy), max(until - time.monotonic(), 0))
            for connection in ready:
                worker = busy[connection]  # type: ignore[index]
                yield looked_at(worker, worker.receive())
                begin_next(worker)
            for worker in busy.values():
                if worker.connection in ready or worker.connection.poll():
                    continue
                if time.monotonic() > worker.deadline:
                    yield looked_at(worker, worker.hung())
                    begin_next(worker)
    finally:
        for worker in workers:
            worker.connection.close()  # All end at once.
        for worker in workers:
            worker.stop()


def lanes_of(cases: Iterable[Case], jobs: int) -> tuple[Lane, ...]:
    """The cases in groups of one mechanism and dtype; for several jobs, those of JAX are last.

    Several processes take from both ends, so that one of them compiles and another does not.
    """

    def compiles(case: Case) -> bool:
        return named(case.library).compiles_operations

    lanes: dict[bool, Lane] = {False: deque(), True: deque()}
    for key, group in groupby(cases, key=lambda c: (compiles(c), c.mechanism, c.dtype)):
        lanes[jobs > 1 and key[0]].append(list(group))
    return tuple(lane for lane in lanes.values() if lane)
