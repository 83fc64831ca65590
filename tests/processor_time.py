"""Processor seconds of the tests by file, and the budget that holds them.

A run with the variable `PROCESSOR_SECONDS=FILE` writes the seconds of each test file, with those of
the processes that its tests start, and the seconds of a fixed loop that runs before each file.

    python -m tests.processor_time TIER FILE            fails above 110 % of the budget
    python -m tests.processor_time TIER FILE --save     writes the budget

The budget is in `processor_seconds.json`. Its seconds are scaled by the loop, so that it holds on
faster and slower machines. A commit that raises it may not change tests.
"""

from __future__ import annotations

import json
import resource
import subprocess
import time
from collections import Counter
from collections.abc import Generator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import numpy as np
import pytest

BUDGET = Path(__file__).with_name("processor_seconds.json")
ALLOWED = 1.1
COLLECTION = "imports and collection"
PROPERTY = "processor seconds"
LOOP = "seconds of the loop"


def seconds_so_far() -> float:
    """Processor seconds of this process, and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def seconds_of_loop() -> float:
    """Processor seconds of a loop of Python and of small arrays, about 0.03."""
    start = time.process_time()
    rows = np.linspace(0.0, 1.0, 32 * 32).reshape(32, 32)
    for _ in range(3000):
        rows = np.tanh(rows @ rows.T / 32)
        sum(i * i for i in range(200))
    return time.process_time() - start


class ProcessorTime:
    """The pytest plugin. Workers of xdist measure; the main process adds up and writes."""

    def __init__(self, config: pytest.Config, path: str | None) -> None:
        self.config, self.path = config, path
        self.files: Counter[str] = Counter()
        self.total = 0.0
        self.loops: list[float] = []
        self.start = 0.0
        self.file = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        file = item.nodeid.partition("::")[0]
        if file != self.file:
            self.file = file
            self.loops.append(seconds_of_loop())
        self.start = seconds_so_far()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            report.user_properties.append((PROPERTY, seconds_so_far() - self.start))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self.files[file] += sum(s for name, s in report.user_properties if name == PROPERTY)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Let a worker measure, too."""
        node.workerinput["processor_seconds"] = True

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add what a worker sent at its end."""
        self.total += node.workeroutput["seconds"]
        self.loops += node.workeroutput["loops"]

    def pytest_sessionfinish(self) -> None:
        if self.path is None:
            output = self.config.workeroutput  # type: ignore[attr-defined]
            output.update(seconds=seconds_so_far(), loops=self.loops)
            return
        total = self.total or seconds_so_far()
        self.files[COLLECTION] = total - sum(self.files.values())
        run = {LOOP: median(self.loops), **self.files}
        Path(self.path).write_text(json.dumps(run, indent=0), encoding="utf-8")


def scaled(run: dict[str, float], loop: float) -> Counter[str]:
    """Seconds by file as on the machine whose loop takes `loop` seconds."""
    factor = loop / run[LOOP]
    return Counter({file: factor * s for file, s in run.items() if file != LOOP})


class BudgetComparison(NamedTuple):
    """A run beside the budget."""

    seconds: float
    budget: float
    grown: list[tuple[str, float, float]]
    """Files that take longer, most first: name, seconds in the budget, seconds now."""

    @property
    def is_within(self) -> bool:
        return self.seconds <= ALLOWED * self.budget

    def __str__(self) -> str:
        said = f"{self.seconds:.0f} processor seconds, scaled; the budget is {self.budget:.0f}"
        if self.is_within:
            return said
        grown = [f"{file}: {before:.1f} -> {now:.1f}" for file, before, now in self.grown]
        return "\n  ".join([f"{said}, of which 110 % are allowed. These files grew:", *grown])


def compare(run: dict[str, float], budget: dict[str, float]) -> BudgetComparison:
    """The sums of both, and the files that grew by more than a second."""
    now = scaled(run, budget[LOOP])
    before = scaled(budget, budget[LOOP])
    grown = [(file, before[file], s) for file, s in now.items() if s > before[file] + 1]
    grown.sort(key=lambda each: each[1] - each[2])
    return BudgetComparison(now.total(), before.total(), grown)


def raised_beside_tests(root: Path) -> list[str]:
    """The commits that raise the budget of a tier and change another file of the tests."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    path = BUDGET.relative_to(BUDGET.parents[1]).as_posix()
    commits = git("log", "--no-merges", "--format=%H", "--", path).split()
    wrong = []
    for commit, before in pairwise(commits):
        now, then = (json.loads(git("show", f"{at}:{path}")) for at in (commit, before))
        is_raised = any(
            scaled(now[tier], then[tier][LOOP]).total()
            > scaled(then[tier], then[tier][LOOP]).total()
            for tier in now.keys() & then.keys()
        )
        files = git("show", "--format=", "--name-only", commit, "--", "tests", "docs").split()
        if is_raised and files != [path]:
            wrong.append(commit)
    return wrong


def main(tier: Annotated[str, "first or second"], file: Path, save: bool = False) -> None:
    """Compare a run with the budget of its tier, or save it as the budget."""
    import typer

    run = json.loads(file.read_text(encoding="utf-8"))
    budgets = json.loads(BUDGET.read_text(encoding="utf-8")) if BUDGET.exists() else {}
    if save:
        small = sorted(f for f, s in run.items() if s < 0.5 and f != LOOP)
        others = sum(run.pop(f) for f in small)
        budgets[tier] = {f: round(s, 4) for f, s in sorted((run | {"others": others}).items())}
        BUDGET.write_text(json.dumps(budgets, indent=1) + "\n", encoding="utf-8")
        return
    comparison = compare(run, budgets[tier])
    print(comparison)
    wrong = raised_beside_tests(BUDGET.parents[1])
    if wrong:
        print("these commits raise the budget and change tests:", *wrong)
    raise typer.Exit(wrong != [] or not comparison.is_within)


if __name__ == "__main__":
    import typer

    typer.run(main)
