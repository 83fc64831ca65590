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
def test_a_stage_runs_resumes_and_says_what_it_compared(tmp_path):
    """The stage runs one CUDA kernel in the simulator."""
    arguments = ("--stage", "alive", "--device", "cpu", "--match", "cupy unit_rows float32 64")
    first = run(*arguments, "--out", str(tmp_path / "one"))
    assert first.returncode == 0, first.stderr
    assert "1/1 passed    cupy unit_rows float32 64" in first.stdout
    assert "alive: 1 passed; 1 in" in first.stdout
    saved = json.loads((tmp_path / "one" / "cpu" / "alive.json").read_text())
    assert saved["machine"]["device"] == "cpu"
    entry = saved["tasks"]["cupy unit_rows float32 64"]
    assert entry["data"]["kernels"] == ["unit_rows<float>", "unit_rows_vjp<float, true>"]
    assert 0 < entry["data"]["error"] < entry["data"]["bound"]
    assert len(entry["code"]) == 12
    second = run(*arguments, "--before", str(tmp_path / "one"), "--out", str(tmp_path / "two"))
    assert "alive: 1 passed; 0 in 0 s; complete" in second.stdout
    assert (tmp_path / "two" / "cpu" / "alive.json").exists()


@pytest.mark.thorough(
    but=(
        "arguments2-no task of these stages has 'lucyd' in its name",
        "arguments0-there is no stage 'headlines'",
    )
)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stage", "headlines", "--out", "x"), "there is no stage 'headlines'"),
        (("--stage", "alive"), "--stage NAME and --out FOLDER are needed"),
        (
            ("--stage", "smoke", "--match", "lucyd", "--out", "x"),
            "no task of these stages has 'lucyd' in its name",
        ),
        (("--device", "tpu", "--list"), "--device must be cuda or cpu; found 'tpu'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_how_to_go_on(tmp_path):
    result = run("--stage", "alive", "--out", str(tmp_path))
    assert result.returncode == 2
    assert "PyTorch sees no GPU here; `--device cpu` runs what a CPU can run" in result.stderr


@pytest.mark.thorough
def test_stages_that_need_a_gpu_are_left_on_a_cpu(tmp_path):
    result = run("--stage", "sanitizer", "--device", "cpu", "--out", str(tmp_path))
    assert result.returncode == 3
    assert "sanitizer: needs a GPU" in result.stdout


def test_a_dry_run_wants_an_empty_folder(tmp_path):
    (tmp_path / "something").touch()
    result = run("--stage", "memory", "--dry-run", "--out", str(tmp_path))
    assert result.returncode == 2
    assert "must be an empty folder for a dry run" in result.stderr


@pytest.mark.thorough
def test_each_device_has_a_folder_and_results_of_another_one_are_left(tmp_path):
    head = '{"format": 1, "stage": "alive", "machine": {"device": "NVIDIA H200"}, "tasks": {}}'
    other = tmp_path / "nvidia_h200" / "alive.json"
    other.parent.mkdir()
    other.write_text(head)
    arguments = ("--stage", "alive", "--device", "cpu", "--match", "cupy unit_rows float32 64")
    result = run(*arguments, "--before", str(tmp_path), "--out", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert other.read_text() == head
    assert (tmp_path / "cpu" / "alive.json").exists()


def test_results_of_other_versions_are_not_mixed(tmp_path):
    machine = '{"device": "cpu", "versions": {"torch": "1.0"}}'
    (tmp_path / "cpu").mkdir()
    head = f'{{"format": 1, "stage": "memory", "machine": {machine}, "tasks": {{}}}}'
    (tmp_path / "cpu" / "memory.json").write_text(head)
    result = run("--stage", "memory", "--device", "cpu", "--out", str(tmp_path))
    assert result.returncode == 2
    assert "of other versions (" in result.stderr
    assert "torch 1.0, here " in result.stderr


@pytest.mark.thorough
def test_the_prepared_runs_are_rehearsed_on_a_cpu(tmp_path):
    """The first run is rehearsed to its end with one kernel, and the second run after it."""
    arguments = ("--device", "cpu", "--cores", "4", "--match", "cupy unit_rows float32 64")
    out = ("--out", str(tmp_path))
    first = run("--first", *arguments, *out, "--limit", "60")
    text = first.stdout
    assert first.returncode in (0, 1), first.stderr
    assert text.index("two kernels: ") < text.index("alive A: ") < text.index("headlines: ")
    assert "passed    cupy unit_rows float32 64" in text.partition("alive B: ")[2]
    assert "did not pass" in text
    assert (tmp_path / "cpu" / "alive.json").exists()
    second = run("--second", *arguments, *out, "--limit", "25")
    assert second.returncode in (0, 1), second.stderr
    assert "headlines: " in second.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--first", "--second", "--out", "x"), "give one of --stage, --first and --second"),
        (("--first", "--stage", "alive", "--out", "x"), "give one of --stage"),
        (("--first",), "--out FOLDER is needed"),
        (("--first", "--ptxas", "nowhere", "--out", "x"), "--ptxas must be a program; found"),
    ],
)
def test_bad_arguments_of_the_prepared_runs_are_named(arguments, message):
    result = run(*arguments, "--device", "cpu")
    assert result.returncode == 2
    assert message in result.stderr
