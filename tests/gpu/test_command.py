"""The command line on a machine without a GPU."""

import json
import os
import subprocess
import sys

import pytest


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "precondattn_gpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.thorough
def test_the_prepared_runs_are_rehearsed_on_a_cpu(tmp_path):
    """The first run is rehearsed to its end with one kernel, and the second run after it."""
    name = "cupy unit_rows float32 64"
    arguments = ("--device", "cpu", "--cores", "4", "--match", name)
    first = run("--first", *arguments, "--out", str(tmp_path / "one"), "--limit", "60")
    text = first.stdout
    assert first.returncode in (0, 1), first.stderr
    assert text.index("two kernels: ") < text.index("alive A: ") < text.index("headlines: ")
    assert f"passed    {name}" in text.partition("alive B: ")[2]
    assert "did not pass" in text
    saved = json.loads((tmp_path / "one" / "cpu" / "alive.json").read_text())
    assert saved["machine"]["device"] == "cpu"
    entry = saved["tasks"][name]
    assert entry["data"]["kernels"] == ["unit_rows<float>", "unit_rows_vjp<float, true>"]
    assert 0 < entry["data"]["error"] < entry["data"]["bound"]
    assert len(entry["code"]) == 12
    out = ("--before", str(tmp_path / "one"), "--out", str(tmp_path / "two"))
    second = run("--second", *arguments, *out, "--limit", "25")
    assert second.returncode in (0, 1), second.stderr
    assert "headlines: " in second.stdout
    assert "alive: 1 passed" in second.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "tpu"), "--device must be cuda or cpu; found 'tpu'"),
        (("--device", "cpu", "--out", "{out}"), "torch 1.0, here "),
    ],
)
def test_bad_arguments_and_results_of_other_versions_are_refused(tmp_path, arguments, message):
    machine = '{"device": "cpu", "versions": {"torch": "1.0"}}'
    (tmp_path / "cpu").mkdir()
    head = f'{{"format": 1, "file": "alive", "machine": {machine}, "tasks": {{}}}}'
    (tmp_path / "cpu" / "alive.json").write_text(head)
    result = run("--first", *(each.format(out=tmp_path) for each in arguments))
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.thorough
def test_a_headline_has_rows_with_ratios_and_reasons(tmp_path):
    pytest.importorskip("triton", minversion="3.6")
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "precondattn_gpu.timed_call", "triton", "lucid"]
    command += ["b=1,t=20,h=2,n=1,d=16", "--work", "forward", "--work", "decode"]
    command += ["--peer", "sdpa", "--peer", "flash_sdpa", "--dtype", "float32"]
    command += ["--device", "cpu", "--rounds", "2", "--result", str(result)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for row in json.loads(result.read_text())["rows"]:
        assert row["status"] == "timed"
        assert "triton" in row["backends"]
        assert row["ratios"]["sdpa"]["median"] > 0
        assert "kernel for GPUs" in row["absent_peers"]["flash_sdpa"]
