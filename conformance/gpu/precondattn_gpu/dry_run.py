"""A simulated run: the clock is simulated, and every task passes after its estimated time.

It shows the order, how many calls each stage takes, that an interrupted task resumes, and that the
files stay within their limits. Its results are marked as simulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from precondattn_gpu.driver import Running, Summary, run_stage
from precondattn_gpu.estimates import start_up
from precondattn_gpu.options import RunOptions
from precondattn_gpu.results import LARGEST, MOST_FILES, Results
from precondattn_gpu.stages import Stage
from precondattn_gpu.task import PASSED, Finished, ProcessTask, TaskOutcome

PRETENDED = "pretended"


@dataclass
class Pretended:
    """A simulated process, and the time at which it ends."""

    task: ProcessTask
    started: float
    ends: float
    in_new_worker: bool = False


class Pretending:
    """A launcher whose clock jumps to the end of the next process."""

    def __init__(
        self,
        seconds_of: Callable[[ProcessTask], float] = lambda task: task.seconds,
        *,
        has_workers: bool = False,
    ) -> None:
        self.clock = 0.0
        self.seconds_of = seconds_of
        self.has_workers = has_workers
        """Whether starting a new worker adds its start-up to a task's time."""
        self._idle: Counter[tuple[object, ...]] = Counter()
        self.order: list[str] = []
        """The names of tasks in the order in which they were started."""

    def now(self) -> float:
        return self.clock

    def start(self, task: ProcessTask) -> Pretended:
        self.order.append(task.name)
        more = 0.0
        if self.has_workers and task.worker:
            kind = task.kind
            if self._idle[kind]:
                self._idle[kind] -= 1
            else:
                more = start_up(task.worker)
        ends = self.clock + self.seconds_of(task) + more
        return Pretended(_passing(task), self.clock, ends, more > 0)

    def wait(self, running: Sequence[Running], until: float) -> Running | None:
        first = min(running, key=_end)
        if _end(first) > until:
            self.clock = max(self.clock, until)
            return None
        self.clock = max(self.clock, _end(first))
        return first

    def finish(self, running: Running) -> Finished:
        code = 0 if _end(running) <= self.clock else None
        if code == 0 and running.task.worker:
            self._idle[running.task.kind] += 1
        return Finished(code, PRETENDED, Path(), self.clock - running.started)


def _end(running: Running) -> float:
    assert isinstance(running, Pretended)
    return running.ends


def _passing(task: ProcessTask) -> ProcessTask:
    return ProcessTask(task.name, task.arguments, lambda finished: TaskOutcome(PASSED, PRETENDED),
                task.seconds, task.timeout, task.environment, worker=task.worker,
                data=task.data)  # fmt: skip


class DryCall(NamedTuple):
    """One call of the driver in a dry run."""

    number: int
    summary: Summary


def dry_run(
    stages: Sequence[Stage], options: RunOptions, folder: Path, limit: float
) -> list[DryCall]:
    """Call the driver until every stage is complete; each call loads what the last one saved.

    Raises
    ------
    RuntimeError
        if a stage makes no progress, or a file or their number is over its limit.
    """
    launcher = Pretending()
    calls: list[DryCall] = []
    for stage in stages:
        tasks = stage.tasks(options)
        while True:
            path = folder / f"{stage.name}.json"
            results = (
                Results.load(path) if path.exists() else Results(stage.name, {PRETENDED: True})
            )
            summary = run_stage(
                results, tasks, launcher, folder, jobs=stage.jobs(options), limit=limit
            )
            calls.append(DryCall(len(calls) + 1, summary))
            if summary.is_complete:
                break
            if not summary.ran:
                raise RuntimeError(f"{stage.name}: no task ends within {limit:.0f} s")
    files = sorted(folder.glob("*.json"))
    if len(files) > MOST_FILES:
        raise RuntimeError(f"{len(files)} files; at most {MOST_FILES} are carried")
    for path in files:
        if path.stat().st_size > LARGEST:
            raise RuntimeError(f"{path.name} has {path.stat().st_size} bytes; at most {LARGEST}")
    return calls
