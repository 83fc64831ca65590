"""Runs tasks within a time limit.

    end = now + limit
    while tasks are left or running:
        start the next task, if a process is free
        wait until a task has finished, was longer than its timeout, or `end` has come
        save its outcome

A task that runs when the time is over is stopped, and is the first of the next call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from precondattn_gpu.results import Results
from precondattn_gpu.task import (
    CRASHED,
    FAILED,
    INTERRUPTED,
    TIMED_OUT,
    Finished,
    ProcessTask,
    TaskOutcome,
)

if TYPE_CHECKING:
    from precondattn.json_types import Json

RESERVE = 1.0
"""Seconds before the end at which the processes are stopped."""


class Running(Protocol):
    """A process that was started."""

    task: ProcessTask
    started: float


class Launcher(Protocol):
    """Starts processes and waits for them; it owns the clock."""

    def now(self) -> float:
        """The current time in seconds."""

    def start(self, task: ProcessTask) -> Running:
        """Start a process for the task."""

    def wait(self, running: Sequence[Running], until: float) -> Running | None:
        """Return a process that has ended, or None at the time `until`."""

    def finish(self, running: Running) -> Finished:
        """The exit code and output of a process; it is stopped if it still runs."""


class Summary(NamedTuple):
    """The counts of one run of tasks."""

    ran: int
    """The number of tasks that ended in this run."""
    left: int
    """The number of tasks that still have to run."""
    seconds: float


def run_tasks(
    results: Results,
    tasks: Sequence[ProcessTask],
    launcher: Launcher,
    folder: Path,
    *,
    jobs: int = 1,
    limit: float,
    started: Callable[[str], None] = lambda text: None,
    **more: Json,
) -> Summary:
    """Run the unfinished tasks, save after each one, and stop in time.

    `more` is saved with each result. `started` is called with a line of text for each event.
    """
    start = launcher.now()
    end = start + limit - RESERVE
    todo = [task for task in tasks if not results.is_done(task.name)]
    # Interrupted tasks are first: they then have the whole time limit.
    todo.sort(key=lambda task: task.name not in results.tasks)
    total, ran = len(todo), 0
    running: list[Running] = []
    results.save(folder)
    while todo or running:
        while todo and len(running) < jobs and launcher.now() < end:
            running.append(launcher.start(todo.pop(0)))
        if not running:
            break
        due = min(end, *(r.started + r.task.timeout for r in running))
        ended = launcher.wait(running, due)
        if ended is None:
            overdue = [r for r in running if launcher.now() >= r.started + r.task.timeout]
            if not overdue:
                break
            ended = overdue[0]
        running.remove(ended)
        finished = launcher.finish(ended)
        outcome = outcome_of(ended.task, finished)
        ran += 1
        results.add(ended.task.name, outcome, finished.seconds, **more)
        results.save(folder)
        first_line = outcome.message.strip().partition("\n")[0]
        started(f"{ran}/{total} {outcome.status:9s} {ended.task.name}  {first_line}".rstrip())
    for each in running:
        finished = launcher.finish(each)
        message = f"the time of the call was over after {finished.seconds:.0f} s"
        results.add(each.task.name, TaskOutcome(INTERRUPTED, message), finished.seconds, **more)
    results.save(folder)
    return Summary(ran, len(todo) + len(running), launcher.now() - start)


def outcome_of(task: ProcessTask, finished: Finished) -> TaskOutcome:
    """The outcome of a task whose process has ended or was stopped at its timeout."""
    if finished.code is None:
        end = finished.output[-1000:]
        outcome = TaskOutcome(TIMED_OUT, f"stopped after {finished.seconds:.0f} s\n{end}")
        if finished.result.is_file():  # The partial result that it saved.
            with contextlib.suppress(Exception):
                outcome.data = task.outcome_of(finished).data
    elif finished.code < 0:
        outcome = TaskOutcome(CRASHED, f"signal {-finished.code}\n{finished.output}")
    else:
        try:
            outcome = task.outcome_of(finished)
        except Exception as error:  # An unreadable result is a result of the task.
            text = f"{type(error).__name__}: {error}\n{finished.output}"
            outcome = TaskOutcome(FAILED, f"exit code {finished.code}, no result: {text}")
    outcome.data = {**task.data, **task.found(finished.output), **outcome.data}
    return outcome
