"""The cases as tests, timed by pytest-benchmark. Only `command.py` runs this file."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from precondattn_conformance.bench.cases import BenchCase
from precondattn_conformance.bench.measure import MeasureOptions, describe, empty_row, measure
from precondattn_conformance.bench.progress import BenchProgress, Interruption
from precondattn_conformance.bench.record import Row
from precondattn_conformance.bench.table import duration

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


class Collector:
    """The pytest plugin of one run: what to measure and, afterwards, the rows."""

    def __init__(
        self,
        cases: list[BenchCase],
        options: MeasureOptions,
        progress: BenchProgress,
        interruption: Interruption,
    ) -> None:
        self.cases, self.progress, self.interruption = cases, progress, interruption
        self.options = replace(options, at_round=self._at_round)
        self.rows: list[Row] = []

    def _at_round(self, number: int, rounds: int) -> None:
        self.interruption.check()
        self.progress.at_round(number, rounds)

    def measure(self, case: BenchCase, benchmark: BenchmarkFixture) -> None:
        self.progress.starts(empty_row(case).name)
        describe(benchmark, case)
        row = measure(case, self.options, benchmark)
        self.interruption.check()  # A case that was interrupted has no result.
        self.rows.append(row)
        self.progress.ends(duration(row.seconds["median"]) if row.seconds else row.status)
        benchmark.skipped = not row.seconds  # Otherwise the fixture warns that it was not used.

    @pytest.fixture
    def collector(self) -> Collector:
        return self

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        metafunc.parametrize("case", self.cases)


def test_case(case: BenchCase, collector: Collector, benchmark: BenchmarkFixture) -> None:
    collector.measure(case, benchmark)
