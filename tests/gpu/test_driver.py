"""The driver stops in time, saves results, and resumes; tested with a simulated clock."""

from precondattn_gpu.driver import RESERVE, run_tasks
from precondattn_gpu.results import Results
from precondattn_gpu.task import INTERRUPTED, PASSED, ProcessTask, TaskOutcome
from tests.gpu.simulated import SimulatedProcesses


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
