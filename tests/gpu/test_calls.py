"""The calls cover every kernel variant, and their results are read correctly."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import precondattn as pa
from precondattn.kernel_backend.kernel_table import recurrences_in
from precondattn_gpu import alive, first_headline, sanitizer, shipped
from precondattn_gpu.options import BACKENDS
from precondattn_gpu.task import Finished


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
        of_call = variants.launches(call.mechanism, call.dtype, call.d, call.e, call.is_step)
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


def test_a_wrong_call_says_by_how_much(tmp_path):
    result = {"status": "wrong", "message": "off by 3", "error": 3.0, "kernels": ["first"]}
    outcome = alive.outcome_of(finished(tmp_path, 0, "launch first", result))
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
    outcome = sanitizer.outcome_of(finished(tmp_path, sanitizer.FOUND, MEMCHECK))
    assert outcome.status == "wrong"
    assert "Invalid __global__ read of size 2 bytes" in outcome.message
    clean = "========= ERROR SUMMARY: 0 errors"
    passed = finished(tmp_path, 0, clean, {"status": "passed", "kernels": []})
    assert sanitizer.outcome_of(passed).message == "ERROR SUMMARY: 0 errors"


def test_without_a_summary_the_sanitizer_has_failed(tmp_path):
    outcome = sanitizer.outcome_of(finished(tmp_path, 1, "Device not supported"))
    assert outcome.status == "failed"
    assert "Device not supported" in outcome.message


def test_the_worst_row_of_a_benchmark_is_its_status(tmp_path):
    rows = [
        {"case": "forward_lucid", "status": "timed", "reason": "", "seconds": {"median": 0.002},
         "ratios": {"flash_sdpa": {"median": 2.5}}, "peak_bytes": []},
        {"case": "decode_lucid", "status": "wrong", "reason": "off by 3", "seconds": {},
         "ratios": {}, "peak_bytes": []},
    ]  # fmt: skip
    outcome = first_headline.outcome_of(finished(tmp_path, 1, "", {"rows": rows}))
    assert outcome.status == "wrong"
    assert outcome.message == "forward_lucid: 2.000 ms, 2.50 × flash_sdpa\ndecode_lucid: off by 3"
    outcome = first_headline.outcome_of(finished(tmp_path, 1, "", {"rows": rows[:1]}))
    assert outcome.status == "passed"
