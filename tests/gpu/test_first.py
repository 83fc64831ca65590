"""The prepared runs: order, times, assemblers, and what runs after failures."""

from dataclasses import replace

import pytest

from precondattn_gpu import first, first_command, first_headline, second
from precondattn_gpu.alive_parts import bundled, is_first, others
from precondattn_gpu.alive_parts import first as of_a
from precondattn_gpu.dry_run import Pretending
from precondattn_gpu.options import PTXAS, RunOptions
from precondattn_gpu.results import Results
from precondattn_gpu.shipped import calls
from precondattn_gpu.task import PASSED, WRONG, TaskOutcome

GPU = RunOptions(cores=16, ptxas="/carried/ptxas")


def empty():
    return {name: Results(name) for name in first_command.FILES[first_command.SECOND]}


@pytest.fixture(scope="module")
def pretended(tmp_path_factory):
    lines, folder = [], tmp_path_factory.mktemp("pretended")
    seconds = first_command.pretend(GPU, folder, lines.append)
    return lines, folder, seconds


def test_the_first_run_takes_less_than_eight_and_a_half_minutes_and_the_second_three(pretended):
    _, folder, seconds = pretended
    assert seconds[first_command.FIRST] <= 8.5 * 60
    assert seconds[first_command.SECOND] <= 3 * 60
    assert len(list(folder.glob("*.json"))) <= first_command.MOST_FILES


def test_all_headlines_run_in_a_dry_run_and_most_of_a(pretended):
    _, folder, _ = pretended
    headlines = Results.load(folder / "first_headline.json")
    assert headlines.count(PASSED) >= len(first_headline.HEADLINES)
    alive = Results.load(folder / "alive.json")
    names = {call.name for name in ("triton", "pallas", "cupy") for call in calls(name)
             if is_first(call)}  # fmt: skip
    assert all(alive.tasks[name]["status"] == PASSED for name in names)


def test_a_part_stops_at_its_mark_and_one_that_ends_early_lets_the_next_begin(tmp_path):
    plan, results = first.parts(GPU), empty()
    launcher = Pretending(lambda task: 200.0 if task.name.startswith("triton") else 1.0)
    launcher.clock = 1000.0
    lines = []
    first.run(plan[:3], launcher, tmp_path, 1000.0 - 15.0, results, lines.append)
    ends = [float(line.rpartition(" ")[2]) for line in lines if "at second" in line]
    assert ends[0] < 30  # The rates and two kernels are quick here.
    assert ends[1] == 120 - first.RESERVE
    assert ends[2] <= 225


def test_bfloat16_at_width_128_comes_first_then_its_other_dtypes_then_other_widths():
    def dtypes_and_widths(tasks):
        return list(dict.fromkeys((t.data["width"], t.data["dtype"]) for t in tasks))

    assert dtypes_and_widths(of_a(GPU)) == [(128, "bfloat16")]
    assert {t.data["backend"] for t in of_a(GPU)[:3]} == {"triton", "pallas", "cupy"}
    order = dtypes_and_widths(others(GPU))
    assert order[:3] == [(128, "float16"), (128, "float32"), (64, "bfloat16")]
    assert order.index((256, "bfloat16")) > order.index((64, "float32"))
    total = sum(len(calls(name)) for name in ("triton", "pallas", "cupy"))
    assert len({task.name for task in (*of_a(GPU), *others(GPU))}) == total


def test_triton_has_the_carried_assembler_and_once_more_its_own():
    for task in of_a(GPU):
        of_triton = task.data["backend"] == "triton"
        assert task.environment.get(PTXAS) == ("/carried/ptxas" if of_triton else None)
    own = bundled(GPU)
    assert {task.name for task in own} == {t.name for t in of_a(GPU) if t.name.startswith("triton")}
    assert not any(PTXAS in task.environment for task in own)
    part = next(each for each in first.parts(replace(GPU, ptxas="")) if each.file == first.BUNDLED)
    assert part.tasks(empty()) == []  # All of them already ran with it.


def test_headlines_share_one_process_and_wait_for_compiled_peers():
    ready = first_headline.ready(GPU, [])
    assert len({(t.worker, *t.environment.items()) for t in ready}) == 1
    assert not any("beside fla" in task.name for task in ready)
    (gla,) = (each for each in first_headline.BESIDE_FLA if each.mechanism == "gla")
    more = first_headline.ready(GPU, [first_headline.compiling_name(gla)])
    assert [task.name for task in more[len(ready):]] == [gla.name]  # fmt: skip


def failed_results():
    results = empty()
    results["alive"].add("triton laser bfloat16 128", TaskOutcome(WRONG, "off by 3\nmore"), 1.0)
    results["alive"].add("cupy softmax float32 64", TaskOutcome(PASSED), 1.0)
    results[first.BUNDLED].add("triton path bfloat16 128", TaskOutcome(WRONG, "off"), 1.0)
    return results


def test_failures_are_a_line_each():
    assert first.failures(failed_results()) == [
        "wrong       alive          triton laser bfloat16 128: off by 3",
        "wrong       alive_bundled  triton path bfloat16 128: off",
    ]


def test_what_failed_runs_under_memcheck_where_that_starts_else_alone():
    results = failed_results()
    again = next(part for part in second.parts(GPU) if part.name == "what failed")
    alone = again.tasks(results)
    assert [task.name for task in alone] == [
        "alone triton laser bfloat16 128",
        "alone triton path bfloat16 128, bundled ptxas",
    ]
    assert [task.environment.get(PTXAS) for task in alone] == ["/carried/ptxas", None]
    assert not any(task.worker or task.prefix for task in alone)
    results[second.FILE].add(second.PROBE, TaskOutcome(PASSED), 1.0)
    assert all(task.prefix[0] == "compute-sanitizer" for task in again.tasks(results))


def test_two_kernels_are_tuned_only_if_nothing_failed():
    tuned = next(part for part in second.parts(GPU) if part.name == "tuning")
    assert tuned.tasks(failed_results()) == []
    assert [task.name for task in tuned.tasks(empty())] == ["lucid_update 128", "laser_forward 128"]
    assert all(task.environment[PTXAS] == "/carried/ptxas" for task in tuned.tasks(empty()))


def test_headlines_that_the_first_run_did_not_reach_are_in_the_second():
    results = empty()
    names = [task.name for task in first_headline.ready(GPU, [])]
    for name in names[:-1]:
        results["first_headline"].add(name, TaskOutcome(PASSED), 1.0)
    part = second.parts(GPU)[0]
    assert [task.name for task in part.tasks(results)] == names[-1:]


def test_a_task_that_does_not_fit_lets_a_shorter_one_begin(tmp_path):
    launcher = Pretending()
    tasks = of_a(GPU)[:3]
    tasks = [replace(task, seconds=s, worker="") for task, s in zip(tasks, (1, 50, 5), strict=True)]
    first.run_stage(Results("alive"), tasks, launcher, tmp_path, limit=20.0)
    assert launcher.order == [tasks[0].name, tasks[2].name]
