"""How many instructions a call takes, counted by valgrind: the same next to any other process.

A time on a shared machine is known to a tenth or worse; two counts of the same code differ by less
than a hundredth. A count says nothing of caches and memory, but what makes a loop longer, or the
calls around it, shows in it at once. So a count is worse if it is above

    (1 + SLACK) · the committed one.

Valgrind shows programs a processor with AVX2. Which kernels a library then chooses may still depend
on its maker, so that counts are compared on the same processor. Calls take fifty times as long as
without valgrind, and are small.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from precondattn_conformance.bench.cases import COMPARED, BenchCase

BLOCKED = (
    "lucid",
    "lucid_backward",
    "laser_backward",
    "gated_delta_backward",
    "ccq_gated_delta",
    "path",
    "window_backward",
)
"""Cases that spend their time in loops over blocks, counted at `TOKENS` tokens of two heads."""

SMALL = (
    "overhead_softmax",
    "overhead_lucid",
    "overhead_ccq_gla",
    "overhead_gated_delta_decode",
    "overhead_lucid_decode",
)
"""Cases that spend it around the arithmetic, counted for one call."""

ROWS = (*BLOCKED, *SMALL)
TOKENS, HEADS = 256, 2
CACHED = 64
"""Tokens in a cache: each of them is computed under valgrind first."""
SLACK, SLACK_OF_SMALL = 0.015, 0.04
"""Small calls depend on the environment too: on paths, and on where Python keeps its objects."""
TIMEOUT = 900.0
PROGRAMS = ("valgrind", "callgrind_control")


class CannotCountError(RuntimeError):
    """Valgrind did not count what was asked for."""


def cases(names: Iterable[str] = ()) -> list[BenchCase]:
    """The rows, or some of them, at the sizes in which they are counted.

    Raises
    ------
    ValueError
        for a name that is no row.
    """
    wanted = tuple(names) or ROWS
    for name in wanted:
        if name not in ROWS:
            raise ValueError(f"{name!r} is no row of instructions; these are {', '.join(ROWS)}")
    return [_counted(case) for case in COMPARED if case.name in wanted]


def _counted(case: BenchCase) -> BenchCase:
    layout = case.layout
    if case.name in BLOCKED:
        layout = layout._replace(t=TOKENS, s=TOKENS, h=HEADS, n=HEADS)
    elif case.work == "decode":
        layout = layout._replace(t=CACHED, s=CACHED)
    return replace(case, layout=layout, peers=(), calls=1)


def missing() -> str | None:
    """Why nothing can be counted here; None if it can."""
    for program in PROGRAMS:
        if shutil.which(program) is None:
            return f"{program} is not installed"
    return None


def counts(names: Iterable[str] = ()) -> dict[str, int]:
    """The instructions of one call of each row, in a process of its own.

    Raises
    ------
    CannotCountError
        if valgrind is missing, fails, or takes longer than `TIMEOUT` seconds.
    """
    rows = [case.name for case in cases(names)]
    if (reason := missing()) is not None:
        raise CannotCountError(reason)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "counts"
        # Counting is switched on in the process, when everything is imported and warm.
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}"]
        command += ["--collect-atstart=no", "--instr-atstart=no", sys.executable, "-m"]
        command += ["precondattn_conformance.bench.count_instructions", *rows]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=TIMEOUT
            )
        except subprocess.TimeoutExpired:
            raise CannotCountError(f"valgrind took more than {TIMEOUT:.0f} seconds") from None
        if done.returncode:
            last = done.stderr.strip().splitlines()[-20:]
            raise CannotCountError("\n".join([f"valgrind ended with {done.returncode}:", *last]))
        return {name: _total(out.with_name(f"counts.{i}")) for i, name in enumerate(rows, 1)}


def _total(dump: Path) -> int:
    """The sum over all functions of one dump."""
    found = re.search(r"^totals: (\d+)", dump.read_text(errors="replace"), re.MULTILINE)
    if found is None or not int(found[1]):
        raise CannotCountError(f"valgrind counted nothing in {dump.name}")
    return int(found[1])


def is_worse(name: str, now: int, committed: int) -> bool:
    """Whether the count of a row is above the committed one by more than the slack."""
    return now > (1 + (SLACK_OF_SMALL if name in SMALL else SLACK)) * committed
