"""The stages' tasks cover every kernel variant, and their results are read correctly."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import precondattn as pa
from precondattn.kernel_backend.kernel_table import recurrences_in
from precondattn_gpu import alive, full, headline, sanitizer, shipped, tuning
from precondattn_gpu.mechanisms import mechanisms_of
from precondattn_gpu.options import BACKENDS, RunOptions
from precondattn_gpu.profile import farthest, kernels_of
from precondattn_gpu.profile import read as read_profile
from precondattn_gpu.stages import STAGES, named
from precondattn_gpu.suite import read_benchmark, read_conformance
from precondattn_gpu.task import Finished

GPU, CPU = RunOptions(cores=16), RunOptions("cpu", cores=2)


@pytest.mark.thorough
def test_the_smallest_calls_launch_every_variant_of_triton():
    """The test uses a separate process, because Triton interprets kernels in this one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("launched_by_triton.py")
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "missing: []\n"


def test_the_smallest_calls_launch_every_variant_of_cupy():
    from precondattn_cupy import variants

    launched = set()
    for call in shipped.calls("cupy"):
        for shared in variants.SHARED.get(call.mechanism, (1,)):
            of_call = variants.launches(
                call.mechanism, call.dtype, call.d, call.e, call.is_step, shared
            )
            launched |= {launch.kernel for launch in of_call}
    assert launched == {variant.name for variant in variants.variants("sm_90")}


def test_a_leaf_that_expects_normalised_keys_is_run_by_what_normalises_them():
    calls = {call.mechanism: call for call in shipped.calls("cupy")}
    given = calls["lucid_solve[normalize=given,beta=true]"]
    assert given.expression == "lucid[normalize=queries_and_keys,beta=true]"
    assert given.mechanism in str(pa.parse(given.expression).program)
    assert calls["softmax"].expression == "softmax"


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
    assert ("gated_delta", "bfloat16", 128) in steps
    assert len(calls) == len(set(calls))


def test_later_stages_begin_with_the_most_used_and_have_every_base_with_kernels():
    names = mechanisms_of("triton")
    assert names[0] == "lucid"
    assert {"rwkv6", "hgrn2", "gdn2"} < {*names}
    assert not {"rwkv6", "conditioned_query"} & {*mechanisms_of("cupy")}


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
@pytest.mark.parametrize("options", [GPU, CPU], ids=["GPU", "CPU"])
def test_names_of_tasks_are_unique_and_each_writes_a_result(stage, options):
    tasks = stage.tasks(options)
    assert len({task.name for task in tasks}) == len(tasks) > 0
    for task in tasks:
        assert "{result}" in task.arguments or stage.name == "profile"
        assert task.timeout >= task.seconds


def test_an_unknown_stage_is_named():
    with pytest.raises(ValueError, match="no stage 'headlines'; there are alive, smoke, headline"):
        named("headlines")


def test_a_selection_by_name():
    tasks = named("smoke").tasks(RunOptions(match="triton lucid"))
    assert [task.name for task in tasks][:2] == ["triton lucid", "triton lucid[beta=true]"]
    assert all("triton lucid" in task.name for task in tasks)


def finished(tmp_path: Path, code: int | None, output: str, result: object = None) -> Finished:
    path = tmp_path / "result.json"
    if result is not None:
        path.write_text(json.dumps(result))
    return Finished(code, output, path, 1.0)


def test_a_process_that_ended_is_a_crash_after_its_last_launch(tmp_path):
    output = "launch first\nlaunch second\nCUDA error: an illegal memory access"
    outcome = alive.read(finished(tmp_path, 1, output))
    assert outcome.status == "crashed"
    assert outcome.message.startswith("exit code 1 after the launch of second\nCUDA error")
    assert outcome.data == {"last_launch": "second"}


def test_a_wrong_call_says_by_how_much(tmp_path):
    result = {"status": "wrong", "message": "off by 3", "error": 3.0, "kernels": ["first"]}
    outcome = alive.read(finished(tmp_path, 0, "launch first", result))
    assert (outcome.status, outcome.message) == ("wrong", "off by 3")
    assert outcome.data == {"error": 3.0, "kernels": ["first"]}


MEMCHECK = """\
========= COMPUTE-SANITIZER
launch lucid_update
========= Invalid __global__ read of size 2 bytes
=========     at lucid_update+0x1d0
========= ERROR SUMMARY: 1 error
"""


def test_a_report_of_the_sanitizer_is_wrong(tmp_path):
    outcome = sanitizer.read(finished(tmp_path, sanitizer.FOUND, MEMCHECK))
    assert outcome.status == "wrong"
    assert "Invalid __global__ read of size 2 bytes" in outcome.message
    clean = "========= ERROR SUMMARY: 0 errors"
    passed = finished(tmp_path, 0, clean, {"status": "passed", "kernels": []})
    assert sanitizer.read(passed).message == "ERROR SUMMARY: 0 errors"


def test_without_a_summary_the_sanitizer_has_failed(tmp_path):
    outcome = sanitizer.read(finished(tmp_path, 1, "Device not supported"))
    assert outcome.status == "failed"
    assert "Device not supported" in outcome.message


def test_the_sanitizer_sees_each_array_as_an_allocation():
    for task in sanitizer.tasks(GPU):
        assert task.prefix[0] == "compute-sanitizer"
        assert any("NO_" in name or "ALLOCATOR" in name for name in task.environment)


METRICS = (
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__time_duration.sum",
    "sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio",
)
ROWS = (
    ("ID", "Kernel Name", "Block Size", "Grid Size", *METRICS),
    ("", "", "", "", "%", "us", "%", "inst", "inst"),
    ("0", "void lucid_update<float, 64>(float *)", "(256, 1, 1)", "(64, 32, 1)", "12.5",
     "1,234.5", "40", "0.5", "1.5"),
    ("1", "lucid_apply", "(128, 1, 1)", "(8, 32, 1)", "90", "100", "10", "2", "1"),
)  # fmt: skip
RAW_PAGE = "==PROF== Connected to process 7\nlaunch lucid_update\n" + "\n".join(
    ",".join(f'"{cell}"' for cell in row) for row in ROWS
)


def test_the_profiler_s_page_is_read(tmp_path):
    kernels = kernels_of(RAW_PAGE)
    assert kernels[0] == {
        "kernel": "lucid_update",
        "seconds": pytest.approx(1234.5e-6),
        "tensor_share": 0.4,
        "bandwidth_share": 0.125,
        "grid": "(64, 32, 1)",
        "block": "(256, 1, 1)",
        "stalls": {"wait": 1.5, "long_scoreboard": 0.5},
    }
    assert [kernel["kernel"] for kernel in farthest(kernels, 1)] == ["lucid_update"]
    assert read_profile(finished(tmp_path, 0, RAW_PAGE)).message == "2 launches, 1.335 ms"
    assert read_profile(finished(tmp_path, 0, "==ERROR== no counters")).status == "failed"


def test_a_record_of_conformance_is_counted(tmp_path):
    """The record comes from a real small run."""
    from precondattn_conformance.case import Case
    from precondattn_conformance.inputs import CallLayout
    from precondattn_conformance.report.record import RecordWriter
    from precondattn_conformance.runner import Outcome

    case = Case("outputs", "lucid", "torch", "float32", CallLayout("plain"), "clustered")
    path = tmp_path / "result.json"
    with RecordWriter(path, backends=(), level="smoke", device=None, filters={}) as recording:
        recording.add(Outcome(case, "passed"))
        recording.add(Outcome(case, "failed", reason="off by 3"))
    outcome = read_conformance(Finished(1, "", path, 1.0))
    assert outcome.status == "wrong"
    assert outcome.message.startswith("1 passed, 1 failed")
    assert outcome.data["failures"] == [case.id]
    assert "off by 3" in outcome.message
    assert read_conformance(Finished(2, "no backend", tmp_path / "none", 1.0)).status == "failed"


def test_the_worst_row_of_a_benchmark_is_its_status(tmp_path):
    rows = [
        {"case": "forward_lucid", "status": "timed", "reason": "", "seconds": {"median": 0.002},
         "ratios": {"flash_sdpa": {"median": 2.5}}, "peak_bytes": []},
        {"case": "decode_lucid", "status": "wrong", "reason": "off by 3", "seconds": {},
         "ratios": {}, "peak_bytes": []},
    ]  # fmt: skip
    outcome = read_benchmark(finished(tmp_path, 1, "", {"rows": rows}))
    assert outcome.status == "wrong"
    assert outcome.message == "forward_lucid: 2.000 ms, 2.50 × flash_sdpa\ndecode_lucid: off by 3"
    outcome = read_benchmark(finished(tmp_path, 1, "", {"rows": rows[:1]}))
    assert outcome.status == "passed"


def test_peers_of_headlines_are_peers():
    from precondattn_conformance.bench.command import _require_peers
    from precondattn_conformance.bench.selection import chosen

    for each in headline.HEADLINES:
        cases = chosen(mechanisms=(each.mechanism,), works=each.works, sizes=(each.sizes,))
        _require_peers(cases, each.peers)


def test_all_checks_of_the_suite_are_in_a_part():
    from precondattn_conformance.checks import CHECKS

    assert sorted(name for names in full.parts().values() for name in names) == sorted(CHECKS)


def test_kernels_with_candidates_have_a_call_to_time():
    from precondattn_triton.candidates import _all

    assert set(_all()) <= set(tuning.CALLS)
