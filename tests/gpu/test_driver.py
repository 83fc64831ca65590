"""The driver stops in time, saves results, and resumes; tested with a simulated clock."""

import json
from pathlib import Path

import pytest

from precondattn_gpu.driver import RESERVE, outcome_of, run_stage
from precondattn_gpu.dry_run import Pretending, dry_run
from precondattn_gpu.options import RunOptions
from precondattn_gpu.results import Results
from precondattn_gpu.stages import STAGES, Stage
from precondattn_gpu.task import INTERRUPTED, PASSED, TIMED_OUT, Finished, ProcessTask, TaskOutcome


def tasks(*seconds: float, timeout: float = 1000.0) -> list[ProcessTask]:
    return [
        ProcessTask(f"task {i}", (), lambda finished: TaskOutcome(PASSED), each, timeout)
        for i, each in enumerate(seconds)
    ]


def statuses(results: Results) -> dict[str, str]:
    return {name: entry["status"] for name, entry in results.tasks.items()}


def test_a_call_ends_before_its_limit_and_the_next_one_continues(tmp_path):
    launcher, todo = Pretending(), tasks(*[30.0] * 7)
    results = Results("alive")
    first = run_stage(results, todo, launcher, tmp_path, limit=100 + RESERVE)
    assert (first.ran, first.left) == (3, 4)
    assert launcher.now() <= 100
    loaded = Results.load(tmp_path / "alive.json")
    second = run_stage(loaded, todo, launcher, tmp_path, limit=100 + RESERVE)
    third = run_stage(loaded, todo, launcher, tmp_path, limit=100 + RESERVE)
    assert (second.left, third.left) == (1, 0)
    assert launcher.order == [task.name for task in todo]


def test_a_task_that_runs_at_the_end_is_the_first_of_the_next_call(tmp_path):
    launcher = Pretending(lambda task: {"task 1": 90.0}.get(task.name, 30.0))
    todo = tasks(30.0, 30.0, 30.0, 30.0)
    results = Results("alive")
    first = run_stage(results, todo, launcher, tmp_path, limit=100 + RESERVE)
    assert statuses(results) == {"task 0": PASSED, "task 1": INTERRUPTED}
    assert (first.ran, first.left, launcher.now()) == (1, 3, 100)
    launcher.order.clear()
    run_stage(results, todo, launcher, tmp_path, limit=200)
    assert launcher.order == ["task 1", "task 2", "task 3"]
    assert set(statuses(results).values()) == {PASSED}


def test_a_task_longer_than_its_timeout_is_stopped_and_done(tmp_path):
    launcher = Pretending(lambda task: {"task 0": 500.0}.get(task.name, 10.0))
    results = Results("alive")
    summary = run_stage(results, tasks(10.0, 10.0, timeout=60.0), launcher, tmp_path, limit=400)
    assert statuses(results) == {"task 0": TIMED_OUT, "task 1": PASSED}
    assert summary.is_complete
    assert launcher.now() == 70


def test_processes_at_once_are_as_many_as_jobs(tmp_path):
    launcher = Pretending()
    summary = run_stage(
        Results("alive"), tasks(*[10.0] * 12), launcher, tmp_path, jobs=4, limit=100
    )
    assert summary.is_complete
    assert launcher.now() == 30


def test_estimates_follow_the_tasks_of_the_call(tmp_path):
    """Tasks take three times their estimate; none is started that would not end in time."""
    launcher = Pretending(lambda task: 3 * task.seconds)
    results = Results("alive")
    run_stage(results, tasks(*[10.0] * 9), launcher, tmp_path, limit=100 + RESERVE)
    assert INTERRUPTED not in statuses(results).values()
    assert launcher.now() == 90


def test_a_task_longer_than_a_call_is_tried_all_the_same(tmp_path):
    launcher = Pretending(lambda task: 5.0)
    assert run_stage(Results("alive"), tasks(900.0), launcher, tmp_path, limit=100).is_complete


def test_what_passed_is_not_run_again_and_what_did_not_is_on_request(tmp_path):
    results = Results("alive")
    results.add("task 0", TaskOutcome(PASSED), 1.0)
    results.add("task 1", TaskOutcome("wrong", "off by 3"), 1.0)
    launcher = Pretending()
    run_stage(results, tasks(1.0, 1.0), launcher, tmp_path)
    assert launcher.order == []
    run_stage(results, tasks(1.0, 1.0), launcher, tmp_path, again=True)
    assert launcher.order == ["task 1"]
    assert statuses(results)["task 1"] == PASSED


def test_a_result_that_can_not_be_read_is_a_failure_with_the_output(tmp_path):
    def unreadable(finished):
        raise KeyError("rows")

    results = Results("alive")
    todo = [ProcessTask("task", (), unreadable, 1.0)]

    class Real(Pretending):
        def start(self, task):
            started = super().start(task)
            started.task = task
            return started

    run_stage(results, todo, Real(), tmp_path)
    assert results.tasks["task"]["status"] == "failed"
    assert "KeyError: 'rows'" in results.tasks["task"]["message"]


def test_what_a_task_saved_before_it_was_stopped_is_kept(tmp_path):
    result = tmp_path / "result.json"
    result.write_text("{}")
    task = ProcessTask("task", (), lambda finished: TaskOutcome(PASSED, data={"row": 1}), 1.0)
    outcome = outcome_of(task, Finished(None, "output", result, 45.0))
    assert (outcome.status, outcome.data) == (TIMED_OUT, {"row": 1})


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dry")
    return dry_run(STAGES, RunOptions(cores=16), folder, 470.0), folder


@pytest.mark.thorough
def test_a_dry_run_of_all_stages_keeps_order_time_and_sizes(dry):
    calls, folder = dry
    names = [call.summary.stage for call in calls]
    assert list(dict.fromkeys(names)) == [stage.name for stage in STAGES]
    assert all(call.summary.seconds <= 470 for call in calls)
    files = list(folder.iterdir())
    assert len(files) == len(STAGES) <= 8
    assert all(path.stat().st_size < 16 << 20 for path in files)
    for stage in STAGES:
        content = json.loads((folder / f"{stage.name}.json").read_text())
        assert content["machine"] == {"pretended": True}
        assert {e["status"] for e in content["tasks"].values()} == {PASSED}


def test_a_dry_run_says_when_a_stage_makes_no_progress(tmp_path, monkeypatch):
    stage = Stage("alive", "", "alone")
    endless = [ProcessTask("endless", (), lambda finished: TaskOutcome(PASSED), 10_000.0, 10_000.0)]
    monkeypatch.setattr(Stage, "tasks", lambda self, options: endless)
    with pytest.raises(RuntimeError, match="alive: no task ends within 100 s"):
        dry_run([stage], RunOptions(), tmp_path, 100.0)


def test_a_result_of_another_format_is_refused(tmp_path):
    path = tmp_path / "alive.json"
    path.write_text('{"format": 99}')
    with pytest.raises(ValueError, match="no file of results of format 1"):
        Results.load(path)
    with pytest.raises(ValueError, match="no file of results"):
        Results.load(Path("nowhere.json"))
