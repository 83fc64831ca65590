"""The prepared runs: tasks with a simulated clock, order, times, and what runs after failures."""

from dataclasses import dataclass, replace
from pathlib import Path

from precondattn_gpu import first, second
from precondattn_gpu.driver import RESERVE, run_tasks
from precondattn_gpu.options import PTXAS, RunOptions
from precondattn_gpu.results import Results
from precondattn_gpu.task import INTERRUPTED, PASSED, WRONG, Finished, ProcessTask, TaskOutcome

GPU = RunOptions(cores=16, ptxas="/carried/ptxas")


def empty():
    return {name: Results(name) for name in (*first.FILES, second.FILE)}


def test_a_part_stops_at_its_mark_and_one_that_ends_early_lets_the_next_begin(tmp_path):
    plan, results = first.parts(GPU), empty()
    launcher = SimulatedProcesses(lambda task: 200.0 if task.name.startswith("triton") else 1.0)
    launcher.clock = 1000.0
    lines = []
    first.run(plan[:3], launcher, tmp_path, 1000.0 - 15.0, results, lines.append)
    ends = [float(line.rpartition(" ")[2]) for line in lines if "at second" in line]
    assert ends[0] < 30  # The rates and two kernels are quick here.
    assert ends[1] == 120 - RESERVE
    assert ends[2] <= 225


def test_what_failed_runs_under_memcheck_where_that_starts_else_alone():
    results = empty()
    results["alive"].add("triton laser bfloat16 128", TaskOutcome(WRONG, "off by 3\nmore"), 1.0)
    results["alive"].add("cupy softmax float32 64", TaskOutcome(PASSED), 1.0)
    results[first.BUNDLED].add("triton path bfloat16 128", TaskOutcome(WRONG, "off"), 1.0)
    assert [line.split(": ")[1] for line in first.failures(results)] == ["off by 3", "off"]
    again = next(part for part in second.parts(GPU) if part.name == "what failed")
    alone = again.tasks(results)
    assert [task.name for task in alone] == [
        "alone triton laser bfloat16 128",
        "alone triton path bfloat16 128, bundled ptxas",
    ]
    assert [task.environment.get(PTXAS) for task in alone] == ["/carried/ptxas", None]
    assert not any(task.worker or task.prefix for task in alone)
    results[second.FILE].add(second.PROBE, TaskOutcome(PASSED), 1.0)
    for task in again.tasks(results):
        assert task.prefix[0] == "compute-sanitizer"
        assert "PYTORCH_NO_CUDA_MEMORY_CACHING" in task.environment


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


def tasks(count: int, timeout: float = 1000.0) -> list[ProcessTask]:
    return [
        ProcessTask(f"task {i}", (), lambda _: TaskOutcome(PASSED), timeout) for i in range(count)
    ]


def statuses(results: Results) -> dict[str, str]:
    return {name: entry["status"] for name, entry in results.tasks.items()}


def test_a_task_that_runs_at_the_end_is_the_first_of_the_next_call(tmp_path):
    launcher = SimulatedProcesses(lambda task: {"task 1": 90.0}.get(task.name, 30.0))
    results = Results("alive")
    first = run_tasks(results, tasks(4), launcher, tmp_path, limit=100 + RESERVE)
    assert statuses(results) == {"task 0": PASSED, "task 1": INTERRUPTED}
    assert (first.ran, first.left, launcher.now()) == (1, 3, 100)
    loaded = Results.load(tmp_path / "alive.json")
    launcher.order.clear()
    run_tasks(loaded, tasks(4), launcher, tmp_path, limit=200)
    assert launcher.order == ["task 1", "task 2", "task 3"]
    assert set(statuses(loaded).values()) == {PASSED}


def test_a_result_that_can_not_be_read_is_a_failure_with_its_reason(tmp_path):
    def unreadable(finished):
        raise KeyError("rows")

    results = Results("alive")
    launcher = SimulatedProcesses(passes=False)
    run_tasks(results, [ProcessTask("task", (), unreadable)], launcher, tmp_path, limit=100)
    assert results.tasks["task"]["status"] == "failed"
    assert "KeyError: 'rows'" in results.tasks["task"]["message"]
