"""The command line on a machine without a GPU."""

import json
import subprocess
import sys

import pytest
import torch


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
        (("--device", "tpu", "--first"), "--device must be cuda or cpu; found 'tpu'"),
        (("--device", "cpu", "--out", "x"), "give one of --first and --second"),
        pytest.param(
            ("--device", "cpu", "--first", "--second", "--out", "x"),
            "give one of --first and --second",
            marks=pytest.mark.thorough,
        ),
        (("--device", "cpu", "--first"), "--out FOLDER is needed"),
        pytest.param(
            ("--device", "cpu", "--first", "--ptxas", "nowhere", "--out", "x"),
            "--ptxas must be a program; found",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_how_to_go_on(tmp_path):
    result = run("--first", "--out", str(tmp_path))
    assert result.returncode == 2
    assert "PyTorch sees no GPU here; `--device cpu` runs what a CPU can run" in result.stderr


def test_results_of_other_versions_are_not_mixed(tmp_path):
    machine = '{"device": "cpu", "versions": {"torch": "1.0"}}'
    (tmp_path / "cpu").mkdir()
    head = f'{{"format": 1, "file": "alive", "machine": {machine}, "tasks": {{}}}}'
    (tmp_path / "cpu" / "alive.json").write_text(head)
    result = run("--first", "--device", "cpu", "--out", str(tmp_path))
    assert result.returncode == 2
    assert "of other versions (" in result.stderr
    assert "torch 1.0, here " in result.stderr
