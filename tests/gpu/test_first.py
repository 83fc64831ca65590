"""The prepared runs: tasks with a simulated clock, order, times, and what runs after failures."""

import json
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import pytest

import precondattn as pa
from precondattn.kernel_backend.kernel_table import recurrences_in
from precondattn_gpu import alive, first, second, shipped
from precondattn_gpu.driver import RESERVE, run_tasks
from precondattn_gpu.options import BACKENDS, PTXAS, RunOptions
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


def test_the_smallest_calls_launch_every_variant_of_cupy():
    from precondattn_cupy import variants

    launched = set()
    for call in shipped.calls("cupy"):
        of_call = variants.launches(call.mechanism, call.dtype, call.d, call.e, call.is_step)
        launched |= {launch.kernel for launch in of_call}
    assert launched == {variant.name for variant in variants.variants("sm_90")}


@pytest.mark.thorough
def test_the_calls_of_pallas_are_those_that_are_compiled():
    from precondattn_pallas import variants

    names = {variant.name for variant in variants.variants("sm_90")}
    calls = list(shipped._listed("pallas"))
    steps = {f"lucid step {call.dtype} {call.d}" for call in calls if call.is_step}
    full_calls = {call.name.removeprefix("pallas ") for call in calls if not call.is_step}
    assert names == steps | full_calls | {f"{name} backward" for name in full_calls}


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_recurrence_runs_and_each_of_the_list_takes_a_step_too(backend):
    """A kernel is chosen by default only if a call of its own leaf agreed."""
    tables = import_module(f"precondattn_{backend}.backend").KERNELS
    table = tables.get("cuda", tables)
    calls = shipped.calls(backend)
    names = {leaf.name for call in calls for leaf in pa.parse(call.mechanism).program.leaves}
    assert names >= {leaf.name for leaf in recurrences_in(table)} >= {"gated_delta", "ssd"}
    assert names >= {leaf.name for leaf in table if isinstance(leaf, type)} - {"unit_rows"}
    steps = {(call.mechanism, call.dtype, call.d) for call in calls if call.is_step}
    assert ("kda", "bfloat16", 128) in steps
    assert len(calls) == len(set(calls))


def finished(tmp_path: Path, code: int | None, output: str, result: object = None) -> Finished:
    path = tmp_path / "result.json"
    if result is not None:
        path.write_text(json.dumps(result))
    return Finished(code, output, path, 1.0)


def test_a_process_that_ended_is_a_crash_after_its_last_launch(tmp_path):
    output = "launch first\nlaunch second\nCUDA error: an illegal memory access"
    outcome = alive.outcome_of(finished(tmp_path, 1, output))
    assert outcome.status == "crashed"
    assert outcome.message.startswith("exit code 1 after the launch of second\nCUDA error")
    assert outcome.data == {"last_launch": "second"}
