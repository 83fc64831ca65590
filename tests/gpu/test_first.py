"""The prepared runs: order, times, assemblers, and what runs after failures."""

from dataclasses import replace

from precondattn_gpu import alive, first, first_headline, second
from precondattn_gpu.driver import RESERVE
from precondattn_gpu.options import PTXAS, RunOptions
from precondattn_gpu.results import Results
from precondattn_gpu.shipped import calls
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


def test_bfloat16_at_width_128_comes_first_then_its_other_dtypes_then_other_widths():
    def dtypes_and_widths(tasks):
        return list(dict.fromkeys((t.data["width"], t.data["dtype"]) for t in tasks))

    assert dtypes_and_widths(alive.first_calls(GPU)) == [(128, "bfloat16")]
    assert {t.data["backend"] for t in alive.first_calls(GPU)[:3]} == {"triton", "pallas", "cupy"}
    order = dtypes_and_widths(alive.others(GPU))
    assert order[:3] == [(128, "float16"), (128, "float32"), (64, "bfloat16")]
    assert order.index((256, "bfloat16")) > order.index((64, "float32"))
    total = sum(len(calls(name)) for name in ("triton", "pallas", "cupy"))
    assert len({task.name for task in (*alive.first_calls(GPU), *alive.others(GPU))}) == total


def test_triton_has_the_carried_assembler_and_once_more_its_own():
    for task in alive.first_calls(GPU):
        of_triton = task.data["backend"] == "triton"
        assert task.environment.get(PTXAS) == ("/carried/ptxas" if of_triton else None)
    bundled = alive.bundled(GPU)
    assert {t.name for t in bundled} == {
        t.name for t in alive.first_calls(GPU) if t.name.startswith("triton")
    }
    assert not any(PTXAS in task.environment for task in bundled)
    part = next(each for each in first.parts(replace(GPU, ptxas="")) if each.file == first.BUNDLED)
    assert part.tasks(empty()) == []  # All of them already ran with it.


def test_peers_of_headlines_are_peers():
    from precondattn_conformance.bench.command import require_peers
    from precondattn_conformance.bench.selection import Selection

    for each in (*first_headline.HEADLINES, *first_headline.BESIDE_FLA):
        selection = Selection(mechanisms=(each.mechanism,), works=each.works, sizes=(each.sizes,))
        require_peers(selection.cases(), each.peers)


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
