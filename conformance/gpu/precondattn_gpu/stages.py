"""The stages, the most valuable first."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from precondattn_gpu.options import RunOptions
from precondattn_gpu.task import ProcessTask

ALONE, HALF, MOST = "alone", "half", "most"


class Stage(NamedTuple):
    """A stage, whose module has the same name."""

    name: str
    what: str
    processes: str
    """The number of concurrent processes: one (for timings), half of the cores, or most."""
    on_a_cpu: bool = True
    """Whether a machine without a GPU can run a part of it."""
    program: str = ""
    """A program that the stage needs."""

    def tasks(self, options: RunOptions) -> list[ProcessTask]:
        """The stage's tasks in order."""
        make: Callable[[RunOptions], list[ProcessTask]] = import_module(
            f"precondattn_gpu.{self.name}"
        ).tasks
        return [task for task in make(options) if options.match in task.name]

    def jobs(self, options: RunOptions) -> int:
        """The number of concurrent processes."""
        share = {ALONE: 1, HALF: options.cores // 2, MOST: options.cores - 2}[self.processes]
        return max(share, 1)

    def estimate(self, options: RunOptions) -> float:
        """Estimated seconds of the whole stage."""
        return sum(task.seconds for task in self.tasks(options)) / self.jobs(options)


STAGES = (
    Stage("alive", "one call of every kernel variant", MOST),
    Stage("smoke", "conformance at its smallest level, on the three kernel backends", MOST),
    Stage("headline", "times beside flash attention and flash-linear-attention", ALONE),
    Stage(
        "sanitizer", "memcheck and racecheck of the smallest calls", HALF, False,
        "compute-sanitizer",
    ),
    Stage("tuning", "the configurations of the hottest kernels, by time", ALONE),
    Stage("full", "the whole conformance suite in bfloat16, float16 and float32", MOST),
    Stage("profile", "counters of the hardware for the headline's kernels", ALONE, False, "ncu"),
    Stage("memory", "peak memory up to 128K tokens", ALONE),
)  # fmt: skip

PREPARED = {
    "roof": "rates of the device, and whether the compilers work",
    "alive_bundled": "the calls of Triton with the assembler that it brings",
    "first_headline": "times of the calls that matter most, in one process",
    "second": "what failed in the first run, once more",
}
"""Files of the prepared runs (`first`, `second`) that belong to no stage, with descriptions."""

WHAT = {**{stage.name: stage.what for stage in STAGES}, **PREPARED}
"""The description of each results file."""

NAMES = tuple(WHAT)


def named(name: str) -> Stage:
    """A stage by its name."""
    for stage in STAGES:
        if stage.name == name:
            return stage
    known = ", ".join(stage.name for stage in STAGES)
    raise ValueError(f"there is no stage {name!r}; there are {known}")
