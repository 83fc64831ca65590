"""`precondattn conformance --devices`: sequences divided among devices, and processes that fail."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from typer.testing import CliRunner

import precondattn as pa
from precondattn.command_line import commands
from precondattn_conformance.division.cases import case_of, divided_cases, sizes_of
from precondattn_conformance.division.parts import ORDERS, ProcessParts
from precondattn_conformance.division.run import run_divided
from precondattn_conformance.inputs import make_inputs
from precondattn_conformance.report.record import load

if not torch.distributed.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)

FOLDER = Path(__file__).parent / "broken_processes"
MAIN = "from precondattn.command_line.cli import main; main()"


BETWEEN_LEAVES = "contiguous-torch-bfloat16-b2t9s9h4n2d8e6u2block2.lengths-random-ccq(atk)"
"""A case whose gradient exceeds its bound if values between leaves are rounded"""


def conformance(*arguments):
    path = os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", MAIN, "conformance", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def plain(order, *mechanisms):
    """The first case of each mechanism, which has no masks."""
    chosen = {}
    for case in divided_cases(2, only_mechanisms=mechanisms, only_checks=(order,)):
        chosen.setdefault(case.mechanism, case)
    return list(chosen.values())


@pytest.mark.thorough
def test_a_run_compares_reports_refusals_and_names_each_fault(tmp_path):
    """A broken exchange, and a process that dies, are reported as such."""
    faulty = ("softmax[softcap=5]", "gla")
    good = [case.id for case in divided_cases(2, only_mechanisms=("lucid",))] + [BETWEEN_LEAVES]
    refused = plain("zigzag", "gated_delta", "unit_rows[axis=channel]")
    ids = good + [case.id for case in (*refused, *plain("contiguous", *faulty))]
    path = tmp_path / "record.json"
    options = [word for text in ids for word in ("--case", text)]
    done = conformance(
        *("--devices", "2", "--record", str(path), *options),
        *("--inside", "broken_processes:faults"),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    record = load(path)
    assert record.filters["devices"] == ["2"]
    found = {(r.mechanism, r.status): r for r in record.outcomes}
    assert {r.status for r in record.outcomes if r.id in good} == {"passed"}
    assert "not consecutive" in found["gated_delta", "unsupported"].reason
    assert "is computed of all" in found["unit_rows[axis=channel]", "unsupported"].reason
    says = {name: found[name, "failed"].reason for name in faulty}
    assert "is off by" in says["softmax[softcap=5]"]
    assert "of process 1" in says["softmax[softcap=5]"]  # It needs others' keys.
    assert says["gla"] == "process 1 died of SIGKILL"
    assert f"--devices 2 --case '{found['gla', 'failed'].id}'" in found["gla", "failed"].snippet


@pytest.mark.thorough
def test_processes_that_wait_in_vain_are_ended(monkeypatch):
    """One process has an error, and another hangs while it waits for it."""
    monkeypatch.syspath_prepend(FOLDER)
    cases = plain("contiguous", "ssd", "linear")
    alone, hung = run_divided(cases, 2, timeout=4, inside="broken_processes:faults")
    assert "process 1 raised MemoryError: no room for the keys; no reply of 0" in alone.reason
    assert hung.reason == "it hung: no reply of process 0, 1 after 4 s"
    assert 'broken_processes.py", line' in hung.details


@pytest.mark.thorough
def test_devices_of_jax_compare_refuse_and_are_found_wrong(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    pytest.importorskip("jax")
    cases = [
        case
        for name in ("lucid", "gated_delta", "softmax[softcap=5]")
        for case in divided_cases(
            2, only_libraries=("jax",), only_mechanisms=(name,), only_checks=("zigzag",)
        )
    ]
    plain, masked, *others = run_divided(cases, 2, inside="broken_devices:faults")
    assert (plain.status, masked.status) == ("passed", "passed")
    refused, _, wrong, _ = others
    assert "tokens that are not consecutive" in refused.reason
    assert "is off by" in wrong.reason
    assert "of device" in wrong.reason


@pytest.mark.parametrize("library", ["torch", "jax"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_parts_put_together_are_the_whole(order, devices, library):
    for words in ("uneven", "one_token_each", "one_key_head", "long"):
        sizes = sizes_of(words, order, devices, library)
        parts = ProcessParts.of_order(order, sizes, devices)
        assert all(len(of) for of in parts.tokens["t"])
        assert library == "torch" or len({len(of) for of in parts.tokens["t"]}) == 1
        m = pa.parse("delta_product")
        for name, x in make_inputs(m, sizes._replace(b=1, d=2, e=2), "random").items():
            pattern = m.inputs[name]
            cut = [parts.cut(x, pattern, device) for device in range(devices)]
            assert np.array_equal(parts.joined(cut, pattern, x.shape), x)


def test_the_id_of_a_case_replays_it():
    for case in divided_cases(3, "stress", only_mechanisms=("lucid", "softmax[bias=true]")):
        assert case_of(case.id) == case


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--devices", "1"), "--devices must be 2 ... 64; found 1"),
        (("--devices", "2", "--library", "numpy"), "found the library 'numpy'"),
        (("--devices", "2", "--check", "outputs"), "no layout of divided sequences; there are"),
        (("--devices", "2", "--jobs", "2"), "--jobs does not go with --devices"),
        (("--devices", "2", "--device", "cuda"), "--device does not go with --devices"),
        (("--devices", "2", "--inside", "math:gone"), "--inside: expected the name of a context"),
        (("--inside", "math:gone"), "--inside needs --devices"),
        (("--devices", "2", "--level", "most"), "level must be one of smoke, full, stress"),
    ],
)
def test_arguments_that_can_not_be_meant_are_refused(arguments, says):
    result = CliRunner().invoke(commands.app, ["conformance", *arguments])
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())
