"""Finds which tests execute which mutant's lines, by running all tests once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from tests.mutation.draw import ROOT, DrawnMutant

STARTUP = Path(__file__).resolve().parent / "startup"
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "times_of_tests"]


def environment(task: Path, times: Path | None = None) -> dict[str, str]:
    """Environment variables for a test process that follows a task file."""
    path = os.pathsep.join(p for p in (str(STARTUP), os.environ.get("PYTHONPATH", "")) if p)
    found = {**os.environ, "PYTHONPATH": path, "MUTATION": str(task)}
    return found | ({} if times is None else {"TIMES": str(times)})


def cover(sample: list[DrawnMutant], folder: Path, options: list[str]) -> int:
    """Run the tests with pytest's options, and write notes and times to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    note: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, drawn in enumerate(sample):
        if not drawn.is_there:
            continue
        first, last = drawn.mutant().lines
        for line in range(first, last + 1):
            note[drawn.module][line].append(number)
    task = folder / "note.json"
    task.write_text(json.dumps({"note": note, "folder": str(folder)}), encoding="utf-8")
    times = folder / "times.json"
    return subprocess.run(
        [*PYTEST, *options], cwd=ROOT, env=environment(task, times), check=False
    ).returncode


def covering(sample: list[DrawnMutant], folder: Path) -> list[list[str]]:
    """The tests of each mutant, in the order in which they were noted."""
    found: list[dict[str, None]] = [{} for _ in sample]
    for file in sorted(folder.glob("*.notes")):
        for line in file.read_text(encoding="utf-8").splitlines():
            number, _, test = line.partition("\t")
            found[int(number)][alone(test)] = None
    return [list(tests) for tests in found]


def alone(test: str) -> str:
    """The smallest unit that runs alone: a test, or a page, whose blocks use those above them."""
    file = test.partition("::")[0]
    return file if file.endswith(".md") else test


def seconds_of(folder: Path) -> dict[str, float]:
    """The seconds of each test that passed, and of each page."""
    data = json.loads((folder / "times.json").read_text(encoding="utf-8"))
    found: dict[str, float] = {}
    for test, seconds in data["seconds"].items():
        if data["outcomes"].get(test) == "passed":
            found[alone(test)] = found.get(alone(test), 0.0) + seconds
    return found
