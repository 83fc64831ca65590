"""`precondattn bench` and `precondattn compare`."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from precondattn.dispatch.discovery import discover
from precondattn.installed import is_installed
from precondattn.json_types import JsonObject
from precondattn_conformance import libraries
from precondattn_conformance.bench import machine
from precondattn_conformance.bench.cases import BenchCase, declared
from precondattn_conformance.bench.compare import (
    IMPROVED,
    REGRESSED,
    UNCOMPARED,
    changes,
    machines_differ,
)
from precondattn_conformance.bench.interruption import Interruption
from precondattn_conformance.bench.neighbours import busy_neighbours
from precondattn_conformance.bench.progress import BenchProgress
from precondattn_conformance.bench.record import FAILED, TIMED, WRONG, BenchRecord, Row, load
from precondattn_conformance.bench.selection import chosen
from precondattn_conformance.bench.table import print_record
from precondattn_conformance.writable import require_writable

if TYPE_CHECKING:
    from precondattn_conformance.bench.measure import MeasureOptions

ISOLATED = {
    "PYTEST_ADDOPTS": None,
    "PYTEST_PLUGINS": None,
    "PYTEST_XDIST_WORKER": None,
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}
"""Environment variables of the run, which exclude the user's own pytest setup."""


def list_cases(console: Console) -> None:
    """Every declared case, by name."""
    table = Table("case", "what", "peers", title="cases", title_justify="left")
    for case in declared():
        peers = ", ".join(case.peers or ()) or "–"
        table.add_row(escape(case.name), escape(case.text()), escape(peers))
    console.print(table)


def bench(
    *,
    names: tuple[str, ...] = (),
    backends: tuple[str, ...] = (),
    device: str | None = None,
    libraries_: tuple[str, ...] = (),
    mechanisms: tuple[str, ...] = (),
    works: tuple[str, ...] = (),
    sizes: tuple[str, ...] = (),
    dtype: str | None = None,
    peers: tuple[str, ...] | None = None,
    rounds: int | None = None,
    neighbours: int = 0,
    memory: bool = False,
    quick: bool = False,
    save: Path | None = None,
    plot: Path | None = None,
    benchmark_json: Path | None = None,
    console: Console,
) -> int:
    """Measure, print, save and draw. The exit code is 0, or 1 if a result is wrong or fails.

    After Ctrl-C the rows that were finished are printed, saved and drawn, and the exit code is 130.
    `peers` are the peers of each case by name; None: those that it declares. `neighbours` other
    processes are busy meanwhile.
    A run in which nothing was measured has failed.

    Raises
    ------
    ValueError, TypeError, ImportError
        if something does not exist or is not installed; raised before anything is measured.
    """
    if rounds is not None and rounds < 1:
        raise ValueError(f"rounds must be 1 or above; found {rounds}")
    if neighbours < 0:
        raise ValueError(f"neighbours must be 0 or above; found {neighbours}")
    require_writable(save, benchmark_json, folder=plot)
    for name in ",".join(backends).split(",") if backends else ():
        discover().named(name)
    cases = chosen(
        names,
        mechanisms=mechanisms,
        works=works,
        libraries_=libraries_,
        sizes=sizes,
        dtype=dtype,
        peers=peers,
        memory=memory,
        quick=quick,
    )
    _require(cases, device, plot is not None)
    _require_peers(cases, peers or ())
    from precondattn_conformance.bench.measure import MeasureOptions

    options = MeasureOptions(device, rounds, memory, quick)
    todo = [(case, backend) for case in cases for backend in backends or (None,)]
    with busy_neighbours(neighbours):
        rows, is_interrupted = _run(todo, options, benchmark_json, console)
    described = machine.describe() | ({"neighbours": neighbours} if neighbours else {})
    record = BenchRecord(machine.now(), described, _rates(rows, options), rows)
    print_record(record, console)
    if save is not None:
        record.save(save)
        console.print(f"saved to {save}", markup=False, soft_wrap=True)
    if plot is not None:
        from precondattn_conformance.bench.plot import draw

        for path in draw(record, plot):
            console.print(f"drew {path}", markup=False, soft_wrap=True)
    if is_interrupted:
        missing = len(todo) - len(rows)
        console.print(f"[red]interrupted[/red]: {missing} of {len(todo)} cases were not measured")
        return 130
    statuses = {row.status for row in rows}
    if TIMED not in statuses:
        console.print("[red]nothing was measured, which counts as a failure[/red]")
    return 0 if TIMED in statuses and not statuses & {WRONG, FAILED} else 1


def _require_peers(cases: list[BenchCase], named: tuple[str, ...]) -> None:
    """Raise an error if a peer does not exist, or is not one of a requested mechanism."""
    from precondattn_conformance.bench.peers import peers_of

    for case in cases if named else ():
        known = {peer.name for peer in peers_of(case)}
        for name in named:
            if name not in known:
                raise ValueError(f"{name} is no peer of {case.mechanism}")


def _require(cases: list[BenchCase], device: str | None, plots: bool) -> None:
    """Raise an error if an extra is missing, or the device does not exist."""
    needs = {"pytest_benchmark": "pytest-benchmark", "pytest": "pytest"}
    needs |= {"matplotlib": "matplotlib"} if plots else {}
    for module, package in needs.items():
        if not is_installed(module):
            raise ImportError(
                f"benchmarks need {package}, which is not installed; install precondattn with "
                f"its extra 'bench'"
            )
    for name in dict.fromkeys(case.library for case in cases):
        if name not in libraries.installed():
            raise ImportError(
                f"cases on {name} were requested, which can not be used here; install "
                f"precondattn with its extra {name!r}, or choose others with --library"
            )
    libraries.require_device((case.library for case in cases), device)


def _run(
    todo: list[tuple[BenchCase, str | None]],
    options: MeasureOptions,
    benchmark_json: Path | None,
    console: Console,
) -> tuple[list[Row], bool]:
    """The rows, from a separate pytest run that does not use the user's configuration.

    The second result is whether the run was interrupted.
    """
    import pytest

    from precondattn_conformance.bench.timed_suite import Collector

    interruption, code, output = Interruption(), None, io.StringIO()
    progress = BenchProgress(console, len(todo))
    collector = Collector(todo, options, progress, interruption)
    with (
        interruption,
        tempfile.TemporaryDirectory() as folder,
        _environment(ISOLATED),
        _only(console, output),
        progress,
    ):
        config = Path(folder) / "pytest.ini"
        config.write_text("[pytest]\n", encoding="utf-8")
        arguments = ["-c", str(config), f"--rootdir={folder}", "-q", "--capture=no", "--noconftest"]
        arguments += ["-p", "no:cacheprovider", "-p", "benchmark", "--import-mode=importlib"]
        arguments += ["--benchmark-disable-gc", "--benchmark-quiet"]
        arguments += [f"--benchmark-storage=file://{folder}"]
        if benchmark_json is not None:
            arguments.append(f"--benchmark-json={benchmark_json.absolute()}")
        suite = Path(__file__).with_name("timed_suite.py")
        code = pytest.main([*arguments, str(suite)], plugins=[collector])
    if interruption.is_here:
        return collector.rows, True
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        console.print(output.getvalue(), markup=False, soft_wrap=True)
    if len(collector.rows) < len(todo):
        raise RuntimeError(f"the benchmark run stopped after {len(collector.rows)} rows")
    return collector.rows, False


@contextlib.contextmanager
def _environment(variables: dict[str, str | None]) -> Iterator[None]:
    """Set environment variables, or unset those that are None, and restore them afterwards."""
    before = {name: os.environ.get(name) for name in variables}

    def set_all(wanted: dict[str, str | None]) -> None:
        for name, value in wanted.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    set_all(variables)
    try:
        yield
    finally:
        set_all(before)


@contextlib.contextmanager
def _only(console: Console, output: io.StringIO) -> Iterator[None]:
    """Only the console writes to the terminal; pytest's output goes to the buffer."""
    file, console.file = console.file, console.file
    try:
        with contextlib.redirect_stdout(output):
            yield
    finally:
        console.file = file


def _rates(rows: list[Row], options: MeasureOptions) -> list[JsonObject]:
    """The machine's own rates in every library and dtype that was timed."""
    wanted = dict.fromkeys((row.library, row.dtype) for row in rows if row.seconds)
    rates = [machine.rates(lib, options.device, d, quick=options.quick) for lib, d in wanted]
    return [each._asdict() for each in rates]


def compare(old: Path, new: Path, threshold: float, console: Console) -> int:
    """Print what changed between two records; the exit code is 1 if something regressed."""
    before, after = load(old), load(new)
    for difference in machines_differ(before, after):
        console.print(f"[yellow]the machines differ[/yellow] in {escape(difference)}")
    changed = changes(before, after, threshold)
    table = Table(title="changes", title_justify="left")
    table.add_column("case", overflow="fold")
    table.add_column("time / peer's, before → now")
    table.add_column("verdict")
    table.add_column("time, now / before", justify="right")
    table.add_column("what changed", overflow="fold")
    colours = {REGRESSED: "red", IMPROVED: "green", UNCOMPARED: "yellow"}
    for change in changed:
        colour = colours.get(change.verdict, "default")
        ratios = [f"{peer} {then:.2f} → {now:.2f}" for peer, then, now in change.ratios]
        table.add_row(
            escape(change.name),
            escape("\n".join(ratios)) or "–",
            f"[{colour}]{change.verdict}[/]",
            "–" if change.time is None else f"{change.time:.2f}",
            escape(change.text),
        )
    console.print(table)
    verdicts = [change.verdict for change in changed]
    regressed = verdicts.count(REGRESSED)
    console.print(
        f"{regressed} of {len(changed)} regressed by more than {threshold:.0%}: in the ratio to a "
        f"peer, in peak memory, or in correctness"
    )
    if UNCOMPARED in verdicts:
        console.print(
            f"{verdicts.count(UNCOMPARED)} of {len(changed)} are not comparable by ratio: no peer "
            f"was measured beside them in both runs"
        )
    if any(change.time is not None for change in changed):
        console.print("times are not judged: on a shared machine, two taken minutes apart differ")
    return 1 if regressed else 0
