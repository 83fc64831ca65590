"""Tasks that share processes: one that crashes, hangs or is wrong affects no other."""

import json
from pathlib import Path

import pytest

from precondattn_gpu import alive
from precondattn_gpu.__main__ import ENVIRONMENT
from precondattn_gpu.driver import run_tasks
from precondattn_gpu.processes import TaskProcesses
from precondattn_gpu.results import Results
from precondattn_gpu.task import CRASHED, FAILED, PASSED, TIMED_OUT, WRONG, ProcessTask, TaskOutcome

HERE = str(Path(__file__).parent)


def read(finished):
    if not finished.result.exists():
        return TaskOutcome(FAILED, finished.output)
    result = json.loads(finished.result.read_text())
    return TaskOutcome(result["status"], finished.output, result)


def stub(name: str, what: str, **more) -> ProcessTask:
    arguments = ("-m", "stub_call", what, "{result}")
    return ProcessTask(name, arguments, read, worker="stub", **({"timeout": 60.0} | more))


def run(tasks, tmp_path, jobs=1):
    results = Results("alive")
    with TaskProcesses(ENVIRONMENT | {"PYTHONPATH": HERE}) as launcher:
        summary = run_tasks(results, tasks, launcher, tmp_path, jobs=jobs, limit=120.0)
    assert summary.left == 0
    return results.tasks


def test_tasks_of_a_kind_share_a_process_and_each_has_its_own_output(tmp_path):
    entries = run([stub("one", "passes"), stub("two", "passes")], tmp_path)
    assert entries["one"]["data"]["pid"] == entries["two"]["data"]["pid"]
    assert (
        entries["one"]["message"] == entries["two"]["message"] == 'passes begins\nledger ["passes"]'
    )


@pytest.mark.thorough
def test_every_process_computes_with_one_thread(tmp_path):
    """Fourteen processes with sixteen threads each would take twice the time."""
    alone = ProcessTask(**{**vars(stub("alone", "passes")), "worker": ""})
    entries = run([stub("shared", "passes"), alone], tmp_path)
    assert entries["shared"]["data"]["threads"] == entries["alone"]["data"]["threads"] == ["1", "1"]


@pytest.mark.thorough
def test_other_variables_are_another_process(tmp_path):
    other = stub("two", "passes", environment={"PRECONDATTN_OTHER": "1"})
    entries = run([stub("one", "passes"), other], tmp_path)
    assert entries["one"]["data"]["pid"] != entries["two"]["data"]["pid"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("what", "status", "message"),
    [
        ("crashes", CRASHED, "signal 11\ncrashes begins"),
        ("wrong", WRONG, "wrong begins"),
        ("raises", FAILED, "an illegal memory access"),
        ("hangs", TIMED_OUT, "hangs begins"),
    ],
)
def test_a_bad_task_ends_its_process_and_the_next_one_has_a_new_one(
    tmp_path, what, status, message
):
    bad = stub("bad", what, timeout=4.0 if what == "hangs" else 60.0)
    entries = run([stub("before", "passes"), bad, stub("after", "passes")], tmp_path)
    assert entries["bad"]["status"] == status
    assert message in entries["bad"]["message"]
    assert entries["after"]["status"] == PASSED
    assert entries["before"]["data"]["pid"] != entries["after"]["data"]["pid"]


@pytest.mark.thorough
def test_a_task_that_hangs_beside_others_does_not_delay_them(tmp_path):
    """The other tasks end in the other process while one hangs."""
    tasks = [stub("hangs", "hangs", timeout=6.0), *(stub(f"{i}", "passes") for i in range(8))]
    entries = run(tasks, tmp_path, jobs=2)
    assert list(entries)[-1] == "hangs"
    assert len({entries[str(i)]["data"]["pid"] for i in range(8)}) == 1


def test_a_worker_that_can_not_start_is_a_failure_with_its_message(tmp_path):
    results = Results("alive")
    with TaskProcesses({"PYTHONPATH": HERE, "PYTHONSTARTUP": ""}) as launcher:
        launcher.environment["PYTHONHOME"] = str(tmp_path / "nowhere")
        run_tasks(results, [stub("one", "passes")], launcher, tmp_path, limit=60.0)
    entry = results.tasks["one"]
    assert entry["status"] == FAILED
    assert "Python" in entry["message"]


def test_a_crash_of_a_call_names_its_last_launch(tmp_path):
    """`alive` reads the output of a task in a worker like that of a separate process."""
    task = stub("call", "raises")
    entries = run([ProcessTask(**{**vars(task), "outcome_of": alive.outcome_of})], tmp_path)
    assert entries["call"]["status"] == CRASHED
    assert "exit code 1 after the launch of none" in entries["call"]["message"]


@pytest.mark.thorough(but=("passes", "crashes"))
@pytest.mark.parametrize("what", ["crashes", "raises", "hangs", "wrong", "passes"])
def test_what_a_call_would_have_shown_is_saved_whatever_came_of_it(tmp_path, what):
    """A kernel that ends its process is then not chosen because another call agreed."""
    timeout = {"timeout": 4.0} if what == "hangs" else {}
    task = stub("call", what, found=alive.entries_in, **timeout)
    assert run([task], tmp_path)["call"]["data"]["ledger"] == [what]
