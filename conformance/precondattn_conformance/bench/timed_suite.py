"""The cases as tests, timed by pytest-benchmark. Only `command.py` runs this file.

A plugin object that the command creates has the cases, and collects their rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from precondattn_conformance.bench.cases import BenchCase
from precondattn_conformance.bench.measure import Options, measure, measure_memory
from precondattn_conformance.bench.record import TIMED, Row

Todo = tuple[BenchCase, str | None]
"""A case, and the backend that is requested for it."""


class Collector:
    """The pytest plugin of one run: what to measure and, afterwards, the rows."""

    def __init__(self, todo: list[Todo], options: Options, progress: Callable[[Row], None]) -> None:
        self.todo, self.options, self.progress = todo, options, progress
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.progress(row)

    @pytest.fixture
    def collector(self) -> Collector:
        return self

    def pytest_generate_tests(self, metafunc: Any) -> None:
        is_memory = metafunc.function.__name__ == "test_memory"
        todo = [(c, backend) for c, backend in self.todo if (c.work == "memory") == is_memory]
        ids = [f"{case.name}-t{case.layout.t}-{backend or 'default'}" for case, backend in todo]
        metafunc.parametrize(("case", "backend"), todo, ids=ids)


def test_time(case: BenchCase, backend: str | None, collector: Collector, benchmark: Any) -> None:
    row = measure(case, backend, collector.options, benchmark)
    collector.add(row)
    if row.status != TIMED:
        benchmark.skipped = True  # Otherwise the fixture warns that it was not used.
        pytest.skip(row.reason)


def test_memory(case: BenchCase, backend: str | None, collector: Collector) -> None:
    collector.add(measure_memory(case, backend, collector.options))
