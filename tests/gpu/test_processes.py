"""Tasks that share processes: one that crashes, hangs or is wrong affects no other."""

import json
import time
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


def run(tasks, tmp_path):
    results = Results("alive")
    with TaskProcesses(ENVIRONMENT | {"PYTHONPATH": HERE}) as launcher:
        summary = run_tasks(results, tasks, launcher, tmp_path, limit=120.0)
    assert summary.left == 0
    return results.tasks


@pytest.mark.thorough(but=("passes", "crashes"))
@pytest.mark.parametrize(
    ("what", "status", "message"),
    [
        ("passes", PASSED, 'passes begins\nledger ["passes"]'),
        ("crashes", CRASHED, "signal 11\ncrashes begins"),
        ("wrong", WRONG, "wrong begins"),
        ("raises", FAILED, "an illegal memory access"),
        ("hangs", TIMED_OUT, "hangs begins"),
    ],
    ids=("passes", "crashes", "wrong", "raises", "hangs"),
)
def test_a_bad_task_ends_its_process_and_the_next_one_has_a_new_one(
    tmp_path, what, status, message
):
    """What a call has shown is kept, whatever came of it; processes compute with one thread."""
    timeout = 4.0 if what == "hangs" else 60.0
    task = stub("task", what, timeout=timeout, found=alive.entries_in)
    alone = ProcessTask(**{**vars(stub("alone", "passes")), "worker": ""})
    entries = run([stub("before", "passes"), task, stub("after", "passes"), alone], tmp_path)
    assert entries["task"]["status"] == status
    assert message in entries["task"]["message"]
    assert entries["task"]["data"]["ledger"] == [what]
    before, after = (entries[name]["data"] for name in ("before", "after"))
    assert (before["pid"] == after["pid"]) == (what == "passes")
    for name in ("before", "after", "alone"):
        assert entries[name]["status"] == PASSED
        assert entries[name]["data"]["threads"] == ["1", "1"]


@pytest.mark.thorough
def test_a_process_that_is_stopped_takes_its_children_with_it(tmp_path):
    """Within two seconds an interpreter starts and starts another, even on a busy machine."""
    pid = tmp_path / "pid"
    code = (
        "import subprocess, sys, time;"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)']);"
        f"open({str(pid)!r}, 'w').write(str(p.pid)); time.sleep(100)"
    )
    results = Results("alive")
    with TaskProcesses() as launcher:
        tasks = [ProcessTask("task", ("-c", code), read, timeout=2.0)]
        run_tasks(results, tasks, launcher, tmp_path / "out", limit=60.0)
    assert results.tasks["task"]["status"] == TIMED_OUT
    stat = Path(f"/proc/{pid.read_text()}/stat")
    for _ in range(100):
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("the child still runs")


def test_a_worker_that_can_not_start_is_a_failure_with_its_message(tmp_path):
    results = Results("alive")
    with TaskProcesses({"PYTHONPATH": HERE, "PYTHONSTARTUP": ""}) as launcher:
        launcher.environment["PYTHONHOME"] = str(tmp_path / "nowhere")
        run_tasks(results, [stub("one", "passes")], launcher, tmp_path, limit=60.0)
    entry = results.tasks["one"]
    assert entry["status"] == FAILED
    assert "Python" in entry["message"]
