"""The cases as tests, timed by pytest-benchmark. Only `command.py` runs this file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from rich.markup import escape

from precondattn_conformance.bench.cases import BenchCase
from precondattn_conformance.bench.measure import MeasureOptions, describe, measure
from precondattn_conformance.bench.record import FAILED, WRONG, Row
from precondattn_conformance.bench.table import duration
from precondattn_conformance.progress import Progress

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


class Collector:
    """The pytest plugin of one run: what to measure and, afterwards, the rows."""

    def __init__(self, cases: list[BenchCase], options: MeasureOptions, progress: Progress) -> None:
        self.cases, self.options, self.progress = cases, options, progress
        self.rows: list[Row] = []

    def measure(self, case: BenchCase, benchmark: BenchmarkFixture) -> None:
        describe(benchmark, case)
        row = measure(case, self.options, benchmark)
        self.rows.append(row)
        self.progress.advance(is_failed=row.status in (WRONG, FAILED))
        outcome = duration(row.seconds["median"]) if row.seconds else row.status
        self.progress.print(f"[dim]{escape(row.name)}: {outcome}[/dim]")
        benchmark.skipped = not row.seconds  # Otherwise the fixture warns that it was not used.

    @pytest.fixture
    def collector(self) -> Collector:
        return self

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        metafunc.parametrize("case", self.cases)


def test_case(case: BenchCase, collector: Collector, benchmark: BenchmarkFixture) -> None:
    collector.measure(case, benchmark)
