"""Runs the tests that execute a mutant's lines, until one fails.

Files most of whose tests execute the lines, and cheap tests, come first; then more of both, and
then all, up to a time limit. If a process takes many times as long as its tests did, the mutant
does not terminate.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.mutation.cover import PYTEST, environment
from tests.mutation.draw import ROOT, DrawnMutant

BATCHES = ((3, 20, 6.0), (12, 300, 60.0), (10_000, 100_000, 240.0))
"""The most files and tests of a batch, and the most seconds that they took without the mutant."""
START, SLOWER = 120.0, 8.0
"""Seconds that a process may take to start, and the factor by which it may be slower."""

NO_TESTS = 5
"""The exit code of pytest if no test was collected. With a mutant that prevents imports, it
differs."""
KILLED, SURVIVED, UNTOUCHED, GONE = "killed", "survived", "untouched", "gone"


@dataclass(frozen=True)
class KillVerdict:
    """The result of a mutant."""

    status: str
    covering: int
    """The number of tests that execute its lines."""
    tried: int
    test: str = ""
    """The test that failed."""
    reason: str = ""

    def saved(self) -> dict[str, Any]:
        """The fields as JSON data."""
        return asdict(self)


def kill(
    drawn: DrawnMutant,
    tests: list[str],
    seconds: dict[str, float],
    options: list[str],
    killers: list[str],
) -> KillVerdict:
    """The verdict of the tests that cover a mutant; only tests in `seconds` may run.

    Tests that killed it in another run come first, even if they are not noted as covering it: if a
    result is computed once per process, only the first test that needs it is noted.
    """
    if not drawn.is_there:
        return KillVerdict(GONE, 0, 0)
    known = [test for test in tests if test in seconds]
    if not any(test in seconds for test in tests + killers):
        return KillVerdict(UNTOUCHED, 0, 0)
    tried = 0
    again = [test for test in killers if test in seconds]
    others = [test for test in known if test not in killers]
    for batch in ([again] if again else []) + list(batches(others, seconds)):
        expected = sum(seconds[test] for test in batch)
        failed = _first_failure(drawn, batch, options, START + SLOWER * expected)
        tried += len(batch)
        if failed is not None:
            return KillVerdict(KILLED, len(known), tried, *failed)
    return KillVerdict(SURVIVED, len(known), tried)


def batches(tests: list[str], seconds: dict[str, float]) -> Iterator[list[str]]:
    """Disjoint batches; in each, one test of every file, then a second of every file."""
    waiting = _by_file(tests, seconds)
    for most_files, most, limit in BATCHES:
        batch: list[str] = []
        total = 0.0
        for test in _in_turn(list(waiting.values())[:most_files]):
            if len(batch) < most and (not batch or total + seconds[test] <= limit):
                batch.append(test)
                total += seconds[test]
        if not batch:
            return
        chosen = set(batch)
        left = {f: [test for test in own if test not in chosen] for f, own in waiting.items()}
        waiting = {file: own for file, own in left.items() if own}
        yield batch


def _by_file(tests: list[str], seconds: dict[str, float]) -> dict[str, list[str]]:
    """The tests of each file, cheap ones first; files about these lines come first."""
    found: dict[str, list[str]] = defaultdict(list)
    for test in sorted(tests, key=lambda each: seconds[each]):
        found[test.partition("::")[0]].append(test)
    every = Counter(test.partition("::")[0] for test in seconds)
    share = {file: len(own) / every[file] for file, own in found.items()}
    return {file: found[file] for file in sorted(found, key=lambda file: -share[file])}


def _in_turn(files: list[list[str]]) -> list[str]:
    longest = max((len(own) for own in files), default=0)
    return [own[i] for i in range(longest) for own in files if i < len(own)]


def _first_failure(
    drawn: DrawnMutant, tests: list[str], options: list[str], limit: float
) -> tuple[str, str] | None:
    mutant = drawn.mutant()
    plant = {
        "module": drawn.module,
        "start": mutant.start,
        "stop": mutant.stop,
        "new": mutant.new,
    }
    with TemporaryDirectory() as folder:
        task, ids = Path(folder) / "plant.json", Path(folder) / "tests.txt"
        task.write_text(json.dumps({"plant": plant}), encoding="utf-8")
        ids.write_text("\n".join(tests) + "\n", encoding="utf-8")
        command = [*PYTEST, "-x", "--no-header", "--tb=line", *options, f"@{ids}"]
        command += ["-p", "no:cacheprovider", "-p", "no:xdist"]
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(task),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )
        try:
            said, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            _end(process)
            return "", f"not ended after {time.monotonic() - began:.0f} s"
    if process.returncode == 0:
        return None
    if "ERROR: not found" in said or process.returncode == NO_TESTS:
        raise RuntimeError(f"no test was found of {tests[:3]}:\n{said[-2000:]}")
    found = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - (.*))?$", said, re.MULTILINE)
    return (found[1], (found[2] or "")[:200]) if found else ("", said.strip()[-200:])


def _end(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
