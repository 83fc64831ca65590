"""The cases as tests, timed by pytest-benchmark. Only `command.py` runs this file.

A plugin object that the command creates has the cases, and collects their rows. In the file of
`--benchmark-json` the rows have the columns and groups of `benchmark_cases`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import precondattn as pa
from precondattn.json_types import JsonObject
from precondattn_conformance.bench.cases import BenchCase
from precondattn_conformance.bench.columns import columns_of
from precondattn_conformance.bench.interruption import Interruption
from precondattn_conformance.bench.measure import MeasureOptions, measure
from precondattn_conformance.bench.peers import computed_by, peers_of
from precondattn_conformance.bench.plan import empty_row
from precondattn_conformance.bench.progress import BenchProgress
from precondattn_conformance.bench.record import Row
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
        self.described: dict[str, BenchCase] = {}
        """The case of each row of pytest-benchmark, by its name."""

    def _at_round(self, number: int, rounds: int) -> None:
        self.interruption.check()
        self.progress.at_round(number, rounds)

    def starts(self, case: BenchCase, backend: str | None) -> None:
        self.progress.starts(empty_row(case, backend, self.options.device).name)

    def describe(self, case: BenchCase, backend: str | None, benchmark: BenchmarkFixture) -> None:
        """Give a row of pytest-benchmark the group, columns and name of the case."""
        columns = columns_of(case, case.library, backend, self.options.device)
        benchmark.group = columns.group
        benchmark.params, benchmark.param = columns._asdict(), columns.id()
        benchmark.name = benchmark.fullname = f"{case.name}[{columns.id()}]"
        self.described[benchmark.fullname] = case

    def pytest_benchmark_update_json(self, output_json: JsonObject) -> None:
        """Each peer is a row of its own beside the case, timed in turns with it."""
        entries = output_json["benchmarks"]
        output_json["benchmarks"] = [row for each in entries for row in self._with_peers(each)]

    def _with_peers(self, entry: JsonObject) -> Iterator[JsonObject]:
        case = self.described[entry["fullname"]]
        yield entry | {"stats": _statistics(entry["stats"]["data"], case.calls)}
        mechanism = pa.parse(case.mechanism)
        seconds = entry["extra_info"].pop("peer_seconds")
        for peer in peers_of(case):
            if peer.name not in seconds:
                continue
            library = peer.library or case.library
            columns = columns_of(case, library, peer.name, self.options.device)
            computed = str(computed_by(peer, mechanism))
            name = f"{case.name}[{columns.id(computed)}]"
            yield {
                **entry,
                "name": name,
                "fullname": name,
                "params": columns._asdict(),
                "param": columns.id(computed),
                "extra_info": {"case": case.name, "computes": computed, "is_peer": True},
                "stats": _statistics(seconds[peer.name], case.calls),
            }

    def add(self, row: Row) -> None:
        self.interruption.check()  # A case that was interrupted has no result.
        self.rows.append(row)
        self.progress.ends(duration(row.seconds["median"]) if row.seconds else row.status)

    @pytest.fixture
    def collector(self) -> Collector:
        return self

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        metafunc.parametrize(("case", "backend"), self.todo)


Untyped = Any
"""A class of pytest-benchmark, which has no types."""


def _statistics(seconds: list[float], calls: int) -> JsonObject:
    """What pytest-benchmark saves of the times of rounds of several calls: those of one call."""
    from pytest_benchmark.stats import Stats

    make: Untyped = Stats
    statistics = make()
    for each in seconds:
        statistics.update(each / calls)
    saved: JsonObject = statistics.as_dict()
    return saved | {"data": statistics.data, "iterations": calls}


def test_case(
    case: BenchCase, backend: str | None, collector: Collector, benchmark: BenchmarkFixture
) -> None:
    collector.starts(case, backend)
    collector.describe(case, backend, benchmark)
    row = measure(case, backend, collector.options, benchmark)
    collector.add(row)
    benchmark.skipped = not row.seconds  # Otherwise the fixture warns that it was not used.
