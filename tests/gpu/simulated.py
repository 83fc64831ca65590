"""A launcher with a simulated clock, which jumps to the end of the next task; every task passes."""

from dataclasses import dataclass, replace
from pathlib import Path

from precondattn_gpu.task import PASSED, Finished, ProcessTask, TaskOutcome


@dataclass
class SimulatedTask:
    task: ProcessTask
    started: float
    ends: float


class SimulatedProcesses:
    def __init__(self, seconds_of=lambda task: 10.0, passes=True):
        self.clock, self.seconds_of, self.passes = 0.0, seconds_of, passes
        self.order = []
        """The names of tasks in the order in which they were started."""

    def now(self):
        return self.clock

    def start(self, task):
        self.order.append(task.name)
        ends = self.clock + self.seconds_of(task)
        if self.passes:
            task = replace(task, outcome_of=lambda finished: TaskOutcome(PASSED))
        return SimulatedTask(task, self.clock, ends)

    def wait(self, running, until):
        first = min(running, key=lambda each: each.ends)
        self.clock = max(self.clock, min(first.ends, until))
        return first if first.ends <= until else None

    def finish(self, running):
        code = 0 if running.ends <= self.clock else None
        return Finished(code, "", Path(), self.clock - running.started)
