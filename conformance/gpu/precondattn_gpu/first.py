"""The first nine minutes on a GPU: which kernels run, which are right, and the ten headline times.

=============  ======  ================================================================
part           until   what
=============  ======  ================================================================
two kernels    0:30    one of CuPy, one of Pallas
alive          2:00    A: bfloat16 at width 128, the three backends, the carried ptxas
rates          2:20    the device's rates, measured by a product and a copy
headlines      3:45    in one process on an idle device
bundled        5:00    Triton's part of A with the assembler in the Triton package
alive          8:30    B: float16, float32, width 64, then 256
=============  ======  ================================================================

Times count from the start of the command line that installs the packages. When a part ends early,
the next one begins. A part that is still running at its time is stopped, and its results so far are
saved.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from precondattn_gpu import alive, first_headline, roof
from precondattn_gpu.driver import Launcher, run_tasks
from precondattn_gpu.options import RunOptions
from precondattn_gpu.results import Results
from precondattn_gpu.task import PASSED, STATUSES, ProcessTask

if TYPE_CHECKING:
    from precondattn.json_types import Json, JsonObject

LIMIT = 510.0
"""Seconds of the whole run."""
BUNDLED = "alive_bundled"
FILES = ("roof", "alive", "first_headline", BUNDLED)
"""The files of results, in order."""


class RunPart(NamedTuple):
    """A part of the run."""

    name: str
    file: str
    until: float
    """Seconds after the start at which the part is stopped."""
    jobs: int
    tasks: Callable[[dict[str, Results]], list[ProcessTask]]
    """Makes the tasks from the earlier results, by file."""


def parts(options: RunOptions, limit: float = LIMIT) -> list[RunPart]:
    """The parts in order; a smaller limit shortens all of them."""
    most, share = max(options.cores - 2, 1), limit / LIMIT
    peers = first_headline.compiling(options)
    return [
        RunPart("two kernels", "roof", 30 * share, 2, lambda results: roof.probes(options)),
        RunPart("alive A", "alive", 120 * share, most,
             lambda results: [*alive.first_calls(options), *peers]),
        RunPart("rates", "roof", 140 * share, 1, lambda results: roof.rates(options)),
        RunPart("headlines", "first_headline", 225 * share, 1,
             lambda results: first_headline.ready(options, passed(results["alive"]))),
        RunPart("alive A, bundled ptxas", BUNDLED, 300 * share, most,
             lambda results: alive.bundled(options) if options.ptxas else []),
        RunPart("alive B", "alive", limit, most,
             lambda results: [*alive.first_calls(options), *peers, *alive.others(options)]),
    ]  # fmt: skip


def passed(results: Results) -> list[str]:
    """The names of the tasks that passed."""
    return [name for name, entry in results.tasks.items() if entry["status"] == PASSED]


def run(
    plan: list[RunPart],
    launcher: Launcher,
    folder: Path,
    start: float,
    results: dict[str, Results],
    said: Callable[[str], None] = print,
    **more: Json,
) -> None:
    """Run the parts, each until its time; `start` is the launcher's time of second 0."""
    for part in plan:
        tasks = part.tasks(results)
        left = part.until - (launcher.now() - start)
        if not tasks or left <= 0:
            said(f"{part.name}: {'nothing to do' if not tasks else 'no time is left'}")
            continue
        said(f"{part.name}: {len(tasks)} tasks, until second {part.until:.0f}")
        summary = run_tasks(
            results[part.file], tasks, launcher, folder,
            jobs=part.jobs, limit=left, started=said, **more,
        )  # fmt: skip
        said(
            f"{part.name}: {summary.ran} in {summary.seconds:.0f} s, {summary.left} left, "
            f"at second {launcher.now() - start:.0f}"
        )


def counts(results: dict[str, Results]) -> list[str]:
    """A line for each file: how many tasks of each status."""
    return [
        f"{file}: " + ", ".join(f"{n} {s}" for s in STATUSES if (n := each.count(s)))
        for file, each in results.items()
        if each.tasks
    ]


def failures(results: dict[str, Results]) -> list[str]:
    """A line for each task that did not pass."""
    return [
        f"{entry['status']:11s} {file:14s} {name}: {first_line(entry)}"
        for file, each in results.items()
        for name, entry in each.tasks.items()
        if entry["status"] != PASSED
    ]


def first_line(entry: JsonObject) -> str:
    """The first line of the message of a task's entry."""
    return str(entry["message"]).strip().partition("\n")[0][:100]
