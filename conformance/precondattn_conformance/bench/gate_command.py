"""`precondattn bench --gate`: measure the rows, print the verdicts, or save the ratios."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from precondattn.json_types import JsonObject
from precondattn_conformance import libraries
from precondattn_conformance.bench import committed, gate, machine
from precondattn_conformance.bench.bootstrap import Interval, ratio_of_medians
from precondattn_conformance.bench.cases import BenchCase
from precondattn_conformance.bench.measure import MeasureOptions, measure
from precondattn_conformance.bench.paired import timed
from precondattn_conformance.bench.record import TIMED
from precondattn_conformance.writable import require_writable

BUDGET = 2.0
"""Seconds for the pairs of a row."""


class Stopwatch:
    """What `measure` asks of pytest-benchmark's fixture, without pytest."""

    def __init__(self) -> None:
        self.extra_info: JsonObject = {}
        self.stats = SimpleNamespace(stats=SimpleNamespace(data=[]))

    def pedantic(
        self, call: Callable[[], object], setup: Callable[[], None], rounds: int, warmup_rounds: int
    ) -> None:
        for i in range(warmup_rounds + rounds):
            setup()
            seconds = timed(call, time.process_time)
            if i >= warmup_rounds:
                self.stats.stats.data.append(seconds)


def ratio_to_peer(case: BenchCase) -> gate.Measured:
    """The ratio of a row, or why there is none. A wrong result has none."""
    if case.library not in libraries.installed():
        return f"{case.library} is not installed"
    watch = Stopwatch()
    row = measure(case, None, MeasureOptions(budget=BUDGET, clock=time.process_time), watch)
    if row.status != TIMED:
        return f"{row.status}: {row.reason}"
    (peer,) = case.peers or ()
    if peer not in watch.extra_info["peer_seconds"]:
        return f"no ratio to {peer}: {row.absent_peers.get(peer, 'it is no peer of this case')}"
    return ratio_of_medians(watch.stats.stats.data, watch.extra_info["peer_seconds"][peer])


def run(names: tuple[str, ...], save: Path | None, console: Console) -> int:
    """Judge the rows; with `save`, measure them `SAVED_RUNS` times and write them to a file.

    The exit code is 1 if a ratio is worse than the committed one, or no longer measured.

    Raises
    ------
    ValueError
        if a name is no row, or if libraries compute on several threads: processor time is measured,
        which then includes the time of threads that wait.
    """
    if os.environ.get("OMP_NUM_THREADS") != "1":
        raise ValueError(
            f"the gate measures processor time on one thread: set OMP_NUM_THREADS=1; found "
            f"{os.environ.get('OMP_NUM_THREADS', 'none')}"
        )
    require_writable(save)
    cases = gate.rows(names)
    flops_per_second = _matrix_product()
    kind = committed.machine_kind()
    if save is not None:
        return _save(cases, kind, flops_per_second, save, console)
    known = committed.of_this_kind(kind)
    if known is None:
        console.print("no committed ratio for this machine: recorded only")
    limit = 0.0 if known is None else gate.IDLE * known.flops_per_second

    def measured(case: BenchCase) -> gate.Measured:
        return _announced(case, console)

    found = gate.outcomes(
        cases, measured, {} if known is None else known.ratios, lambda: _matrix_product() >= limit
    )
    _print(found, console)
    if any(outcome.verdict == gate.BUSY for outcome in found):
        console.print(
            f"the machine is busy: a matrix product reaches less than {gate.IDLE:.0%} of its rate "
            f"when the ratios were committed, so a worse ratio says nothing about the code"
        )
    return 1 if any(outcome.verdict in gate.FAILING for outcome in found) else 0


def _announced(case: BenchCase, console: Console) -> gate.Measured:
    found = ratio_to_peer(case)
    console.print(f"[dim]{escape(case.name)}: {escape(_text(found))}[/dim]", soft_wrap=True)
    return found


def _matrix_product() -> float:
    """FLOP/s now, in the library of most rows."""
    library = "torch" if "torch" in libraries.installed() else "numpy"
    return machine.rates.__wrapped__(library, None, "float32").flops_per_second


def _save(
    cases: list[BenchCase],
    kind: JsonObject,
    flops_per_second: float,
    path: Path,
    console: Console,
) -> int:
    runs = [[_announced(case, console) for case in cases] for _ in range(gate.SAVED_RUNS)]
    of_rows = {case.name: list(each) for case, *each in zip(cases, *runs, strict=True)}
    ratios = {name: ratio for name, each in of_rows.items() if (ratio := gate.envelope(each))}
    committed.save(committed.Committed(kind, machine.now(), flops_per_second, ratios), path)
    console.print(f"saved {len(ratios)} ratios to {path}", markup=False, soft_wrap=True)
    return 0 if len(ratios) == len(cases) else 1


def _print(found: list[gate.GateOutcome], console: Console) -> None:
    table = Table(
        "row", "time / peer's", "committed", "verdict", title="gate", title_justify="left"
    )
    colours = {gate.WORSE: "red", gate.LOST: "red", gate.BETTER: "green", gate.BUSY: "yellow"}
    for outcome in found:
        colour = colours.get(outcome.verdict, "default")
        table.add_row(
            escape(f"{outcome.name} / {gate.ROWS[outcome.name]}"),
            escape("\n".join(map(_text, outcome.measured))),
            "–" if outcome.committed is None else _text(outcome.committed),
            f"[{colour}]{outcome.verdict}[/]",
        )
    console.print(table)


def _text(measured: gate.Measured) -> str:
    if not isinstance(measured, Interval):
        return measured
    return f"{measured.ratio:.2f} ({measured.low:.2f}–{measured.high:.2f})"
