"""How many instructions a call takes, counted by valgrind: the same next to any other process.

    precondattn bench --instructions

A time on a shared machine is known to a tenth or worse; two counts of the same code differ by less
than a hundredth. A count says nothing of caches and memory, but what makes a loop longer, or the
calls around it, shows in it at once. So a count is worse if it is above

    (1 + SLACK) · the committed one.

Valgrind shows programs a processor with AVX2. Which kernels a library then chooses may still depend
on its maker, so that counts are compared on the same processor. Calls take fifty times as long as
without valgrind, and are small.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from precondattn.json_types import JsonObject
from precondattn_conformance.bench import machine
from precondattn_conformance.bench.cases import COMPARED, BenchCase
from precondattn_conformance.writable import require_writable

FILE = Path(__file__).with_name("committed_instructions.json")

BLOCKED = (
    *("lucid", "lucid_backward", "laser_backward", "gated_delta_backward"),
    *("ccq_gated_delta", "path", "window_backward"),
)
"""Cases that spend their time in loops over blocks, counted at `TOKENS` tokens of two heads."""

SMALL = (
    *("overhead_softmax", "overhead_lucid", "overhead_ccq_gla"),
    *("overhead_gated_delta_decode", "overhead_lucid_decode"),
)
"""Cases that spend it around the arithmetic, counted for one call."""

ROWS = (*BLOCKED, *SMALL)
TOKENS, HEADS = 256, 2
CACHED = 64
"""Tokens in a cache: each of them is computed under valgrind first."""
SLACK, SLACK_OF_SMALL = 0.015, 0.04
"""Small calls depend on the environment too: on paths, and on where Python keeps its objects."""
TIMEOUT = 900.0


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
    programs = [name for name in ("valgrind", "callgrind_control") if shutil.which(name) is None]
    return f"{programs[0]} is not installed" if programs else None


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
    total = re.search(r"^totals: (\d+)", dump.read_text(errors="replace"), re.MULTILINE)
    if total is None or not int(total[1]):
        raise CannotCountError(f"valgrind counted nothing in {dump.name}")
    return int(total[1])


def kind() -> JsonObject:
    """What has to be equal so that counts are."""
    described = machine.describe()
    return {
        "system": described["system"],
        "processor": described["processor"],
        "model": _processor_model(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "versions": {name: described["versions"].get(name) for name in ("numpy", "torch")},
    }


def _processor_model(info: Path = Path("/proc/cpuinfo")) -> str:
    """Family, model and cache: a virtual machine may hide the processor's name."""
    text = info.read_text() if info.exists() else ""
    values = {
        name: re.search(rf"^{name}\s*: (.*)$", text, re.MULTILINE)
        for name in ("cpu family", "model", "cache size")
    }
    return ", ".join(f"{name} {value[1]}" for name, value in values.items() if value)


def load(path: Path) -> list[JsonObject]:
    """The entries of a file, one for each kind; none if it does not exist.

    Raises
    ------
    ValueError
        if the file has something else in it.
    """
    if not path.exists():
        return []
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        if any(set(entry) != {"kind", "date", "counts"} for entry in entries):
            raise TypeError
    except (TypeError, ValueError):
        raise ValueError(f"{path} has no counts of instructions") from None
    return list(entries)


def _of_kind(path: Path, this: JsonObject) -> dict[str, int]:
    return next((entry["counts"] for entry in load(path) if entry["kind"] == this), {})


def run(names: tuple[str, ...], save: Path | None, console: Console) -> int:
    """Count the rows and judge them, or write them to a file.

    The exit code is 1 if a count is worse than the committed one. Where valgrind is missing nothing
    is judged.

    Raises
    ------
    ValueError, CannotCountError
        if a name is no row, or if valgrind fails.
    """
    cases(names)  # Names are checked first.
    require_writable(save)
    if (reason := missing()) is not None:
        console.print(f"no instructions were counted: {reason}")
        return 0 if save is None else 1
    this = kind()
    committed = _of_kind(FILE, this)
    if save is None and not committed:
        console.print("no committed counts for these versions: recorded only")
    counted = counts(names)
    verdicts = {name: _verdict(name, count, committed.get(name)) for name, count in counted.items()}
    table = Table("row", "instructions", "/ committed", "verdict", title="instructions")
    table.title_justify = "left"
    colours = {"worse": "red", "better": "green"}
    for name, verdict in verdicts.items():
        share = f"{counted[name] / committed[name]:.3f}" if name in committed else "–"
        text = f"[{colours.get(verdict, 'default')}]{verdict}[/]"
        table.add_row(escape(name), f"{counted[name]:,}", share, text)
    console.print(table)
    console.print(
        f"worse is {SLACK:.1%} above the committed count, of small calls {SLACK_OF_SMALL:.0%}"
    )
    if save is None:
        return 1 if "worse" in verdicts.values() else 0
    others = [entry for entry in load(save) if entry["kind"] != this]
    merged = {**_of_kind(save, this), **counted}
    entries = [*others, {"kind": this, "date": machine.now(), "counts": merged}]
    save.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    console.print(f"saved {len(counted)} counts to {save}", markup=False, soft_wrap=True)
    return 0


def _verdict(name: str, count: int, committed: int | None) -> str:
    """What a count of a row is beside the committed one."""
    if committed is None:
        return "new"
    factor = 1 + (SLACK_OF_SMALL if name in SMALL else SLACK)
    if count > factor * committed:
        return "worse"
    return "better" if committed > factor * count else "fine"
