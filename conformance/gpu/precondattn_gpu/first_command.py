"""`--first` and `--second`: the prepared runs, from the command line to the last line printed."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from precondattn_gpu import first, machine, second
from precondattn_gpu.driver import Launcher, Summary
from precondattn_gpu.dry_run import PRETENDED, Pretending
from precondattn_gpu.first import RunPart
from precondattn_gpu.options import RunOptions
from precondattn_gpu.processes import TaskProcesses
from precondattn_gpu.results import Results

if TYPE_CHECKING:
    from precondattn.json_types import Json

FIRST, SECOND = "first", "second"
FILES = {FIRST: first.FILES, SECOND: (*first.FILES, second.FILE, "tuning")}
MOST_FILES = 6
"""The largest number of files that can be carried from the GPU machine."""

Say = Callable[[str], None]


def run(
    which: str,
    options: RunOptions,
    out: Path,
    before: Path | None,
    limit: float | None,
    since: float | None,
    environment: dict[str, str],
    say: Say,
) -> bool:
    """Run the first or the second run; returns whether everything passed.

    `since` is the time at which the command line began, in seconds since 1970; None means now.
    """
    described = machine.describe(options)
    name = machine.folder_name(described["device"])
    results = _earlier(which, [folder / name for folder in (out, before) if folder is not None])
    for each in results.values():
        machine.require_same(each.stage, each.machine, described)
        each.machine = dict(described)
    say(
        f"{described['device']}: " + ", ".join(f"{n} {v}" for n, v in described["versions"].items())
    )
    with TaskProcesses(environment) as launcher:
        start = launcher.now() - (0.0 if since is None else max(time.time() - since, 0.0))
        date = datetime.now(UTC).isoformat(timespec="seconds")
        _run(which, options, limit, launcher, out / name, start, results, say,
             date=date, code=machine.code())  # fmt: skip
        bad = first.failures(results)
        say(f"\n{len(bad)} did not pass" + (":" if bad else ""))
        for line in (*bad, *first.counts(results)):
            say(line)
    return not bad


def _run(
    which: str,
    options: RunOptions,
    limit: float | None,
    launcher: Launcher,
    folder: Path,
    start: float,
    results: dict[str, Results],
    say: Say,
    **more: Json,
) -> list[tuple[RunPart, Summary]]:
    module = first if which == FIRST else second
    plan = module.parts(options, module.LIMIT if limit is None else limit)
    return first.run(plan, launcher, folder, start, results, say, **more)


def _earlier(which: str, folders: list[Path]) -> dict[str, Results]:
    """The results saved by earlier calls, from the first folder that has them."""
    found = {}
    for name in FILES[which]:
        paths = [path for folder in folders if (path := folder / f"{name}.json").exists()]
        found[name] = Results.load(paths[0]) if paths else Results(name)
    return found


def pretend(options: RunOptions, out: Path, say: Say) -> dict[str, float]:
    """Simulate both runs with a clock that jumps; returns the seconds that each would take.

    In the simulated first run every result is right, and no kernel is compiled beforehand.

    Raises
    ------
    RuntimeError
        if one of them takes longer than its limit, or there are too many files.
    """
    seconds = {}
    results = {name: Results(name, {PRETENDED: True}) for name in FILES[SECOND]}
    for which, module in ((FIRST, first), (SECOND, second)):
        launcher = Pretending(has_workers=True)
        launcher.clock = INSTALLATION if which == FIRST else STARTING
        _run(which, options, None, launcher, out, 0.0, results, say)
        seconds[which] = launcher.now()
        say(f"{which}: {launcher.now():.0f} s of {module.LIMIT:.0f}\n")
        if launcher.now() > module.LIMIT:
            raise RuntimeError(f"the {which} run would take {launcher.now():.0f} s")
    files = sorted(out.glob("*.json"))
    if len(files) > MOST_FILES:
        raise RuntimeError(f"{len(files)} files; at most {MOST_FILES} are carried")
    size = sum(path.stat().st_size for path in files)
    say(f"{len(files)} files, {size / 2**20:.1f} MiB")
    return seconds


INSTALLATION, STARTING = 12.0, 5.0
"""Seconds before the first task: installing the carried wheels, and starting Python."""
