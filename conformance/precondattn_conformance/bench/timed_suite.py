"""The cases as tests, timed by pytest-benchmark. Only `command.py` runs this file.

A plugin object that the command creates has the cases, and collects their rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from precondattn_conformance.bench.cases import BenchCase
from precondattn_conformance.bench.interruption import Interruption
from precondattn_conformance.bench.measure import MeasureOptions, measure, measure_memory
from precondattn_conformance.bench.plan import empty_row
from precondattn_conformance.bench.progress import BenchProgress
from precondattn_conformance.bench.record import TIMED, Row
from precondattn_conformance.bench.table import duration

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

Todo = tuple[BenchCase, str | None]
"""A case, and the backend that is requested for it."""


class Collector:
    """The pytest plugin of one run: what to measure and, afterwards, the rows."""

    def __init__(
        self,
        todo: list[Todo],
        options: MeasureOptions,
        progress: BenchProgress,
        interruption: Interruption,
    ) -> None:
        self.todo, self.progress, self.interruption = todo, progress, interruption
        self.options = replace(options, at_round=self._at_round)
        self.rows: list[Row] = []

    def _at_round(self, number: int, rounds: int) -> None:
        self.interruption.check()
        self.progress.at_round(number, rounds)

    def starts(self, case: BenchCase, backend: str | None) -> None:
        self.progress.starts(empty_row(case, backend, self.options.device).name)

    def add(self, row: Row) -> None:
        self.interruption.check()  # A case that was interrupted has no result.
        self.rows.append(row)
        self.progress.ends(duration(row.seconds["median"]) if row.seconds else row.status)

    @pytest.fixture
    def collector(self) -> Collector:
        return self

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        is_memory = metafunc.function.__name__ == "test_memory"
        todo = [(c, backend) for c, backend in self.todo if (c.work == "memory") == is_memory]
        ids = [f"{case.name}-t{case.layout.t}-{backend or 'default'}" for case, backend in todo]
        metafunc.parametrize(("case", "backend"), todo, ids=ids)


def test_time(
    case: BenchCase, backend: str | None, collector: Collector, benchmark: BenchmarkFixture
) -> None:
    collector.starts(case, backend)
    row = measure(case, backend, collector.options, benchmark)
    collector.add(row)
    if row.status != TIMED:
        benchmark.skipped = True  # Otherwise the fixture warns that it was not used.
        pytest.skip(row.reason)


def test_memory(case: BenchCase, backend: str | None, collector: Collector) -> None:
    collector.starts(case, backend)
    collector.add(measure_memory(case, backend, collector.options))
