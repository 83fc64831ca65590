"""Real processes: their output, results, signals, and children, which are stopped too."""

import json
import os
import sys
import time

import pytest

from precondattn_gpu.driver import RESERVE, run_tasks
from precondattn_gpu.processes import TaskProcesses
from precondattn_gpu.results import Results
from precondattn_gpu.task import CRASHED, INTERRUPTED, PASSED, TIMED_OUT, ProcessTask, TaskOutcome


def task(code: str, **more) -> ProcessTask:
    def read(finished):
        return TaskOutcome(PASSED, finished.output, json.loads(finished.result.read_text()))

    return ProcessTask("task", ("-c", code, "{result}"), read, **more)


def run(tmp_path, each, limit=60.0) -> dict:
    results = Results("alive")
    with TaskProcesses() as launcher:
        run_tasks(results, [each], launcher, tmp_path, limit=limit)
    return results.tasks["task"]


def test_output_result_and_variables(tmp_path):
    code = (
        "import json, os, sys; print('said', file=sys.stderr);"
        "json.dump({'given': os.environ['GIVEN']}, open(sys.argv[1], 'w'))"
    )
    entry = run(tmp_path, task(code, environment={"GIVEN": "3"}))
    assert (entry["status"], entry["message"], entry["data"]) == (PASSED, "said", {"given": "3"})


def test_a_process_that_kills_itself_is_a_crash_with_its_signal(tmp_path):
    entry = run(tmp_path, task("import os; print('before', flush=True); os.kill(os.getpid(), 11)"))
    assert entry["status"] == CRASHED
    assert entry["message"] == "signal 11\nbefore"


def test_no_result_is_a_failure_with_the_output(tmp_path):
    entry = run(tmp_path, task("raise SystemExit('no kernel image')"))
    assert entry["status"] == "failed"
    assert "no kernel image" in entry["message"]


@pytest.mark.parametrize(
    ("timeout", "limit", "status"),
    [(2.0, 60.0, TIMED_OUT), (60.0, RESERVE + 2.0, INTERRUPTED)],
)
def test_a_process_that_is_stopped_takes_its_children_with_it(tmp_path, timeout, limit, status):
    """Within two seconds an interpreter starts and starts another, even on a busy machine."""
    pid = tmp_path / "pid"
    code = (
        "import subprocess, sys, time;"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)']);"
        f"open({str(pid)!r}, 'w').write(str(p.pid)); time.sleep(100)"
    )
    entry = run(tmp_path / "out", task(code, timeout=timeout), limit)
    assert entry["status"] == status
    child = int(pid.read_text())
    for _ in range(100):
        if not _runs(child):
            return
        time.sleep(0.05)
    raise AssertionError("the child still runs")


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


def test_a_prefix_runs_the_interpreter(tmp_path):
    prefix = (sys.executable, "-c", "import subprocess, sys; print('wrapped'); sys.exit("
              "subprocess.call(sys.argv[1:]))")  # fmt: skip
    code = "import json, sys; print('inner'); json.dump({}, open(sys.argv[1], 'w'))"
    entry = run(tmp_path, task(code, prefix=prefix))
    assert entry["status"] == PASSED
    assert sorted(entry["message"].split()) == ["inner", "wrapped"]
