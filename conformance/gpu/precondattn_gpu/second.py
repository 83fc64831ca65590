"""The three minutes after the first run: failed calls again.

Failed calls run under compute-sanitizer's memcheck if it starts, else each alone in a process.
Times beside flash-linear-attention that the first run had no time for come first, since they need
an idle device.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

from precondattn_gpu import alive, first_headline, sanitizer, shipped
from precondattn_gpu.first import BUNDLED, RunPart, passed
from precondattn_gpu.options import BACKENDS, RunOptions
from precondattn_gpu.results import Results
from precondattn_gpu.task import (
    CRASHED,
    FAILED,
    PASSED,
    TIMED_OUT,
    WRONG,
    Finished,
    ProcessTask,
    TaskOutcome,
)

LIMIT = 180.0
FILE = "second"
BAD = (WRONG, FAILED, CRASHED, TIMED_OUT)
PROBE = "memcheck starts"
PROBE_CODE = "import torch; torch.zeros(1, device='cuda'); torch.cuda.synchronize()"


def parts(options: RunOptions, limit: float = LIMIT) -> list[RunPart]:
    """The parts in order."""
    half, share = max(options.cores // 2, 1), limit / LIMIT

    def headlines(results: dict[str, Results]) -> list[ProcessTask]:
        ready = first_headline.ready(options, passed(results["alive"]))
        return [each for each in ready if not results["first_headline"].is_done(each.name)]

    def again(results: dict[str, Results]) -> list[ProcessTask]:
        checks = PROBE in passed(results[FILE])
        return failed(results, options, checks)

    probe = [] if options.is_cpu or shutil.which("compute-sanitizer") is None else [_probe()]
    return [
        RunPart("headlines", "first_headline", 95 * share, 1, headlines),
        RunPart("sanitizer", FILE, 110 * share, 1,
             lambda results: probe if failed(results, options, False) else []),
        RunPart("what failed", FILE, limit, half, again),
    ]  # fmt: skip


def failed(results: dict[str, Results], options: RunOptions, checks: bool) -> list[ProcessTask]:
    """The calls that did not pass, alone in a process or under memcheck."""
    calls = {call.name: call for backend in BACKENDS for call in shipped.calls(backend)}
    tasks = []
    for file in ("roof", "alive", BUNDLED):
        for name, entry in results[file].tasks.items():
            if entry["status"] not in BAD or name not in calls:
                continue
            call, is_bundled = calls[name], file == BUNDLED
            chosen = replace(options, ptxas="") if is_bundled else options
            if checks:
                task = sanitizer.task(call, chosen)
            else:
                task = replace(alive.task(call, chosen), worker="", name=f"alone {name}")
            suffix = ", bundled ptxas" if is_bundled else ""
            tasks.append(replace(task, name=f"{task.name}{suffix}", timeout=100.0))
    return tasks


def _probe() -> ProcessTask:
    """A task that tests whether memcheck can run a PyTorch program here."""
    return ProcessTask(
        PROBE, ("-c", PROBE_CODE), _read_probe, timeout=40.0,
        prefix=sanitizer.PREFIX,
    )  # fmt: skip


def _read_probe(finished: Finished) -> TaskOutcome:
    if finished.code == 0 and "ERROR SUMMARY: 0 errors" in finished.output:
        return TaskOutcome(PASSED)
    return TaskOutcome(FAILED, finished.output)
