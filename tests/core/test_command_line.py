"""`precondattn list`, `explain` and `conformance`, as processes: output and exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

THIRD_PARTY = Path(__file__).parents[1] / "third_party"


def precondattn(*arguments, prefix="", **environment):
    program = f"{prefix}from precondattn.command_line.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_list_names_mechanisms_with_inputs_and_backends_with_their_errors():
    done = precondattn("list", PYTHONPATH=str(THIRD_PARTY))
    assert done.returncode == 0, done.stderr
    for text in ("lucid", "q (b t h d)", "reference", "third_party", "could not be imported"):
        assert text in done.stdout


def test_explain_names_the_backend_of_every_group():
    pytest.importorskip("torch")
    done = precondattn("explain", "lucid(laser)", "--library", "torch", "--verb", "extend")
    assert done.returncode == 0, done.stderr
    assert "lucid(laser): extend of torch float32 on cpu" in done.stdout
    assert "softmax[read=log_mean_exp]  [out]: torch" in done.stdout


def test_conformance_prints_a_table_and_succeeds():
    done = precondattn(
        "conformance", "--library", "numpy", "--mechanism", "lucid", "--dtype", "float64"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "24 passed, 0 failed, 0 unsupported" in done.stdout


def test_conformance_of_a_backend_that_supports_nothing_is_a_failure():
    done = precondattn(
        "conformance", "--backend", "third_party", "--library", "numpy", "--mechanism", "laser",
        PYTHONPATH=str(THIRD_PARTY),
    )  # fmt: skip
    assert done.returncode == 1
    assert "nothing was compared, which counts as a failure" in done.stdout
    assert "knows lucid_solve only" in done.stdout


def test_an_invalid_argument_has_its_own_exit_code():
    for arguments in (
        ("conformance", "--backend", "nobody"),
        ("conformance", "--level", "huge"),
        ("explain", "lucit"),
    ):
        done = precondattn(*arguments)
        assert done.returncode == 2
        assert "unknown" in done.stderr or "level must be" in done.stderr


def test_a_library_that_is_not_installed_is_named():
    absent = "from precondattn_conformance import libraries; "
    absent += "libraries.Jax.is_installed = classmethod(lambda cls: False); "
    done = precondattn("explain", "lucid", "--library", "jax", prefix=absent)
    assert done.returncode == 2
    assert "jax is not installed; installed are ['numpy'" in done.stderr


def test_without_typer_the_command_line_says_what_to_install():
    done = precondattn("list", prefix="import sys; sys.modules['typer'] = None; ")
    assert done.returncode == 2
    assert done.stderr == (
        "precondattn: the command line needs typer, which is not installed; "
        "install precondattn with its extra 'conformance'\n"
    )
