"""The budget of processor time: what is within it, what is not, and which files grew."""

import json
import subprocess

import pytest

from tests import processor_time
from tests.processor_time import BUDGET, LOOP, compare, raised_beside_tests

BEFORE = {LOOP: 0.03, "tests/a.py": 10.0, "tests/b.py": 30.0}


@pytest.mark.parametrize(
    ("run", "is_within", "grown"),
    [
        (BEFORE, True, []),
        ({LOOP: 0.06, "tests/a.py": 20.0, "tests/b.py": 60.0}, True, []),
        ({LOOP: 0.03, "tests/a.py": 13.0, "tests/b.py": 30.0}, True, ["tests/a.py"]),
        ({LOOP: 0.03, "tests/a.py": 16.0, "tests/b.py": 30.0}, False, ["tests/a.py"]),
        ({LOOP: 0.02, "tests/a.py": 10.0, "tests/b.py": 30.0}, False, ["tests/b.py", "tests/a.py"]),
        (BEFORE | {"tests/new.py": 9.0}, False, ["tests/new.py"]),
    ],
)
def test_a_run_beside_the_budget(run, is_within, grown):
    comparison = compare(run, BEFORE)
    assert (comparison.is_within, [file for file, *_ in comparison.grown]) == (is_within, grown)
    assert all(file in str(comparison) for file in grown) or is_within


def test_a_budget_is_raised_in_a_commit_of_its_own(tmp_path, monkeypatch):
    def commit(seconds, **files):
        for name, text in ({"processor_seconds": json.dumps({"first": seconds})} | files).items():
            (tmp_path / "tests" / f"{name}.json").write_text(text)
        git("add", ".")
        git("commit", "-q", "-m", "a change")

    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", *who, "-C", str(tmp_path), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "tests").mkdir()
    git("init", "-q")
    monkeypatch.setattr(processor_time, "BUDGET", tmp_path / "tests" / BUDGET.name)
    commit(BEFORE)
    commit(BEFORE | {"tests/a.py": 9.0}, test_a="less")  # A lower budget goes with its tests.
    commit(BEFORE | {"tests/a.py": 11.0})
    assert raised_beside_tests(tmp_path) == []
    commit(BEFORE | {"tests/a.py": 12.0}, test_a="more")
    assert raised_beside_tests(tmp_path) == [git("rev-parse", "HEAD")]
