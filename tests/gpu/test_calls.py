"""The calls cover every kernel variant, and their results are read correctly."""

import json
from importlib import import_module
from pathlib import Path

import pytest

import precondattn as pa
from precondattn.kernel_backend.kernel_table import recurrences_in
from precondattn_gpu import alive, shipped
from precondattn_gpu.options import BACKENDS
from precondattn_gpu.task import Finished


def test_the_smallest_calls_launch_every_variant_of_cupy():
    from precondattn_cupy import variants

    launched = set()
    for call in shipped.calls("cupy"):
        of_call = variants.launches(call.mechanism, call.dtype, call.d, call.e, call.is_step)
        launched |= {launch.kernel for launch in of_call}
    assert launched == {variant.name for variant in variants.variants("sm_90")}


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
