"""The prepared runs: order, times, assemblers, and what runs after failures."""

from precondattn_gpu import first, second
from precondattn_gpu.driver import RESERVE
from precondattn_gpu.options import PTXAS, RunOptions
from precondattn_gpu.results import Results
from precondattn_gpu.task import PASSED, WRONG, TaskOutcome
from tests.gpu.simulated import SimulatedProcesses

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
