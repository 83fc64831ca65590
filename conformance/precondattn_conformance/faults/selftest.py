"""The self test of the suite: it must catch every fault, and the carriers must pass without one.

A fault first runs on the smoke cases of its mechanism, the case most likely to catch it first, and
then on the full level if none fails. It is caught by the first case that fails. A fault that
survives is an error in the suite, or changes no result.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.markup import escape

from precondattn_conformance.case import Case
from precondattn_conformance.cases import cases
from precondattn_conformance.faults.carriers import CARRIERS, Carrier, helped, registered
from precondattn_conformance.faults.catalogue import (
    OF_EACH_STAGE,
    faults,
    subjects,
)
from precondattn_conformance.faults.fault import BACKWARD, FORWARD, STEP, STEP_BACKWARD, Fault
from precondattn_conformance.process_settings import shared_by
from precondattn_conformance.progress import Progress
from precondattn_conformance.runner import run_case
from precondattn_conformance.status import FAILED, PASSED

SMOKE, FULL = "smoke", "full"

SMOKE_SHARE = 0.9
"""The share of all faults that smoke alone must catch."""

FIRST_CHECK = {
    FORWARD: "outputs",
    BACKWARD: "gradients",
    STEP: "caching",
    STEP_BACKWARD: "states",
}
"""The check that is most likely to catch a fault, by the faulty method."""

FIRST_OF_OPERATOR = {"zero times": "future", "memory of a cache": "cache_operations"}
"""The check that is most likely to catch a fault, by its kind, whatever the method."""

MISSED_BY_SMOKE = "stability"
"""The check that is most likely to catch faults that smoke misses: low-precision states."""


@dataclass(frozen=True)
class FaultVerdict:
    """The result for one fault."""

    fault: str
    caught_at: str | None
    """The level at which a case failed; None if none did."""
    broken: str = ""
    """The traceback if the planted change raised an error, which is not the intended fault."""

    @property
    def is_caught(self) -> bool:
        return self.caught_at is not None and not self.broken


@dataclass(frozen=True)
class Plain:
    """The result of a carrier without a fault, on one mechanism."""

    carrier: str
    mechanism: str
    failures: tuple[str, ...]
    passed: int


@dataclass
class SelfTest:
    """The results of all faults and carriers."""

    verdicts: list[FaultVerdict] = field(default_factory=list)
    plain: list[Plain] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def survivors(self) -> list[FaultVerdict]:
        """The faults that were not caught, and those whose change raised."""
        return [verdict for verdict in self.verdicts if not verdict.is_caught]

    @property
    def smoke_share(self) -> float:
        """The share of the faults that smoke caught."""
        caught = sum(v.is_caught and v.caught_at == SMOKE for v in self.verdicts)
        return caught / max(len(self.verdicts), 1)

    @property
    def failing_carriers(self) -> list[Plain]:
        """Carriers that fail without a fault, or on which no case ran."""
        return [plain for plain in self.plain if plain.failures or not plain.passed]

    @property
    def is_good(self) -> bool:
        """Whether all faults were caught, enough of them by smoke, and nothing else is wrong."""
        return (
            not self.survivors
            and self.smoke_share >= SMOKE_SHARE
            and not self.failing_carriers
            and not missing_faults()
        )


Progressed = Callable[[FaultVerdict | Plain], None]


def missing_faults() -> list[str]:
    """Messages for mechanisms and methods that have too few faults."""
    count = Counter((f.subject, stage) for f in faults() for stage in f.stages)
    return [
        f"{name}, {stage}: {count[name, stage]} of {OF_EACH_STAGE}"
        for name, stages in subjects().items()
        for stage in stages
        if count[name, stage] < OF_EACH_STAGE
    ]


def run_self_test(
    progress: Progressed = lambda done: None,
    *,
    workers: int | None = None,
    only: Iterable[Fault] | None = None,
) -> SelfTest:
    """Run the suite on every fault (or `only` some), in `workers` processes."""
    start = time.perf_counter()
    results = SelfTest()
    for done in _results(list(faults() if only is None else only), workers):
        if isinstance(done, FaultVerdict):
            results.verdicts.append(done)
        else:
            results.plain.append(done)
        progress(done)
    results.seconds = time.perf_counter() - start
    return results


class FaultTask(NamedTuple):
    """The work of one process: some faults, and carriers to run without a fault."""

    names: tuple[str, ...]
    plain: tuple[tuple[str, str, str], ...]
    """(carrier, mechanism, library)"""


AT_ONCE = 25
"""The number of faults in a task, all of one mechanism, so that they share the oracle's results."""


def _results(chosen: list[Fault], workers: int | None) -> Iterator[FaultVerdict | Plain]:
    tasks = _tasks(chosen)
    workers = min(workers or os.cpu_count() or 1, len(tasks))
    if workers <= 1:
        for task in tasks:
            yield from run_task(task)
        return
    context = multiprocessing.get_context("spawn")
    with shared_by(workers), ProcessPoolExecutor(workers, mp_context=context) as pool:
        for future in as_completed([pool.submit(run_task, task) for task in tasks]):
            yield from future.result()


def _tasks(chosen: Iterable[Fault]) -> list[FaultTask]:
    by_mechanism: dict[str, list[Fault]] = defaultdict(list)
    for fault in chosen:
        by_mechanism[fault.mechanism].append(fault)
    tasks = []
    for group in by_mechanism.values():
        plain = tuple(dict.fromkeys((f.carrier, f.mechanism, f.library) for f in group))
        for i in range(0, len(group), AT_ONCE):
            names = tuple(fault.name for fault in group[i : i + AT_ONCE])
            tasks.append(FaultTask(names, () if i else plain))
    return tasks


def run_task(task: FaultTask) -> list[FaultVerdict | Plain]:
    """The results of a task, computed in this process."""
    by_name = {fault.name: fault for fault in faults()}
    results: list[FaultVerdict | Plain] = []
    with planting() as carriers:
        for name, mechanism, library in task.plain:
            results.append(run_plain(carriers[name], name, mechanism, library))
        for fault in (by_name[name] for name in task.names):
            results.append(run_fault(carriers[fault.carrier], fault))
    return results


@contextmanager
def planting() -> Iterator[dict[str, Carrier]]:
    """Context that registers the carriers and turns off warnings, which wrong results cause."""
    with registered() as carriers, warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield carriers


def run_plain(carrier: Carrier, name: str, mechanism: str, library: str = "numpy") -> Plain:
    """Run the smoke cases on a carrier without a fault."""
    carrier.carry(None)
    outcomes = [run_case(case, helped(carrier)) for case in _cases(SMOKE, mechanism, library)]
    failures = tuple(f"{o.case.id}: {o.reason}" for o in outcomes if o.status == FAILED)
    return Plain(name, mechanism, failures, sum(o.status == PASSED for o in outcomes))


def run_fault(carrier: Carrier, fault: Fault, level: str = FULL) -> FaultVerdict:
    """Run cases on one fault until one fails."""
    carrier.carry(fault)
    tried: set[str] = set()
    for each in (SMOKE, level) if level != SMOKE else (SMOKE,):
        for case in _in_order(_cases(each, fault.mechanism, fault.library), fault, each):
            if case.id in tried:
                continue
            tried.add(case.id)
            outcome = run_case(case, helped(carrier))
            if carrier.broken:
                break
            if outcome.status == FAILED and (each == SMOKE or _is_by_fault(carrier, fault, case)):
                return FaultVerdict(fault.name, each)
    broken = carrier.broken or ("" if carrier.reached else "never reached")
    return FaultVerdict(fault.name, None, broken)


def _is_by_fault(carrier: Carrier, fault: Fault, case: Case) -> bool:
    """Whether the case passes without the fault. Smoke cases do, as `run_plain` has shown."""
    carrier.carry(None)
    try:
        return run_case(case, helped(carrier)).status == PASSED
    finally:
        carrier.carry(fault)
        carrier.reached = 1


def _cases(level: str, mechanism: str, library: str) -> list[Case]:
    """The cases of a mechanism; those with other options may lack what a fault changes."""
    chosen = cases(  # As in a run of all mechanisms.
        level, only_libraries=(library,), only_mechanisms=(mechanism,), named="library"
    )
    return [case for case in chosen if case.mechanism == mechanism]


def _in_order(chosen: list[Case], fault: Fault, level: str) -> list[Case]:
    """The cases sorted: the most likely check first, then float64, then short sequences."""
    likely = {FIRST_CHECK[stage] for stage in fault.stages}
    if fault.operator in FIRST_OF_OPERATOR:
        likely = {FIRST_OF_OPERATOR[fault.operator]}
    if level != SMOKE:
        likely = {MISSED_BY_SMOKE}

    def late(case: Case) -> tuple[bool, bool, int]:
        return case.check not in likely, case.dtype != "float64", case.layout.t

    return sorted(chosen, key=late)


def self_test(console: Console) -> int:
    """Run `precondattn conformance --self-test`; returns 0 if every fault is caught, else 1."""
    with Progress(console, len(faults())) as progress:

        def advance(done: FaultVerdict | Plain) -> None:
            if isinstance(done, FaultVerdict):
                progress.advance(is_failed=not done.is_caught)

        results = run_self_test(advance)
    return show(results, console)


def show(results: SelfTest, console: Console) -> int:
    """Print the results in a few lines; returns the exit code."""
    caught = len(results.verdicts) - len(results.survivors)
    console.print(f"{len(results.verdicts)} faults, {caught} caught")
    for verdict in results.survivors:
        console.print(f"[red]survived[/red] {escape(verdict.fault)}", soft_wrap=True)
        for why in verdict.broken.strip().splitlines()[-1:]:
            console.print(f"  {escape(why)}", soft_wrap=True)
    console.print(f"smoke caught {100 * results.smoke_share:.1f} %")
    for plain in results.failing_carriers:
        where = f"{plain.carrier} without a fault on {plain.mechanism}"
        text = plain.failures[0] if plain.failures else "nothing was compared"
        console.print(f"[red]failed[/red] {escape(f'{where}: {text}')}", soft_wrap=True)
    if not results.failing_carriers:
        console.print(f"the carriers without a fault pass ({', '.join(CARRIERS)})")
    for line in missing_faults():
        console.print(f"[red]too few faults[/red] {escape(line)}")
    console.print(f"{results.seconds:.0f} s")
    return 0 if results.is_good else 1
