"""Runs all mutants of a target: the unchanged code first, then each mutant until a case fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from queue import SimpleQueue
from typing import TypeVar

from precondattn_conformance.case import Case
from precondattn_conformance.mutation.mutant import Mutant
from precondattn_conformance.mutation.order import CaseOrder
from precondattn_conformance.mutation.process import MutationProcess, Setting
from precondattn_conformance.mutation.trial import KILLED, TIMEOUT, Baseline, MutantVerdict
from precondattn_conformance.status import PASSED

Item = TypeVar("Item")
Result = TypeVar("Result")


class MutationProcesses:
    """A few worker processes, each of which does one thing at a time."""

    def __init__(self, setting: Setting, count: int) -> None:
        self.all = [MutationProcess(setting, count) for _ in range(count)]
        self.free: SimpleQueue[MutationProcess] = SimpleQueue()
        for process in self.all:
            self.free.put(process)

    def map(
        self, function: Callable[[MutationProcess, Item], Result], items: Iterable[Item]
    ) -> Iterator[tuple[Item, Result]]:
        """Yield the result for each item as soon as it is known."""

        def run(item: Item) -> Result:
            process = self.free.get()
            try:
                return function(process, item)
            finally:
                self.free.put(process)

        with ThreadPoolExecutor(len(self.all)) as pool:
            futures = {pool.submit(run, item): item for item in items}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        for process in self.all:
            process.stop()


def baselines(
    processes: MutationProcesses,
    cases: Sequence[Case],
    timeout: float,
    progress: Callable[[], object] = lambda: None,
) -> list[Baseline]:
    """The cases that pass on the unchanged code and use the target."""
    found = []
    for _, baseline in processes.map(lambda p, case: p.baseline(case, timeout), cases):
        if baseline.status == PASSED and baseline.lines:
            found.append(baseline)
        progress()
    return found


def verdicts(
    processes: MutationProcesses, mutants: Iterable[Mutant], order: CaseOrder
) -> Iterator[tuple[Mutant, MutantVerdict]]:
    """Yield the result of each mutant as soon as it is known."""

    def judged(process: MutationProcess, mutant: Mutant) -> MutantVerdict:
        verdict = process.verdict(mutant, order.cases(mutant))
        if verdict.status in (KILLED, TIMEOUT) and verdict.case:
            order.killed(mutant, verdict.case)
        return verdict

    yield from processes.map(judged, mutants)
