"""`precondattn bench` and `precondattn compare`."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from precondattn.dispatch.discovery import discover
from precondattn.installed import is_installed
from precondattn_conformance import libraries
from precondattn_conformance.bench import machine
from precondattn_conformance.bench.cases import BenchCase, columns_of, declared
from precondattn_conformance.bench.compare import REGRESSED, UNCOMPARED, changes, machines_differ
from precondattn_conformance.bench.record import FAILED, TIMED, WRONG, BenchRecord, Row, load
from precondattn_conformance.bench.selection import Selection
from precondattn_conformance.bench.table import changes_table, print_record
from precondattn_conformance.progress import Progress
from precondattn_conformance.writable import require_writable

if TYPE_CHECKING:
    from precondattn_conformance.bench.measure import MeasureOptions

BUSY = "while True: pass"
"""What another process does beside a run, as a data loader or another user would. An algorithm with
many short parallel regions waits at the end of each for a thread that has lost its core."""


def list_cases(console: Console) -> None:
    """Every declared case, by name."""
    table = Table("case", "what", "peers", title="cases", title_justify="left")
    for case in declared():
        peers = ", ".join(case.peers or ()) or "–"
        what = f"{columns_of(case).group} {case.library}"
        table.add_row(escape(case.name), escape(what), escape(peers))
    console.print(table)


def bench(
    *,
    console: Console,
    rounds: int | None = None,
    neighbours: int = 0,
    memory: bool = False,
    quick: bool = False,
    save: Path | None = None,
    plot: Path | None = None,
    benchmark_json: Path | None = None,
    **selected: Any,
) -> int:
    """Measure, print, save and draw. The exit code is 0, or 1 if a result is wrong or fails.

    After Ctrl-C the rows that were finished are printed, saved and drawn, and the exit code is 130.
    `neighbours` other processes are busy meanwhile. `selected` are the other fields of `Selection`.
    A run in which nothing was measured has failed.

    Raises
    ------
    ValueError, TypeError, ImportError
        if something does not exist or is not installed; raised before anything is measured.
    """
    for name, number, least in (("rounds", rounds, 1), ("neighbours", neighbours, 0)):
        if number is not None and number < least:
            raise ValueError(f"{name} must be {least} or above; found {number}")
    require_writable(save, benchmark_json, folder=plot)
    selection = Selection(memory=memory, quick=quick, **selected)
    cases = selection.cases()
    _require(cases, selection, draws=plot is not None)
    from precondattn_conformance.bench.measure import MeasureOptions

    with _busy_neighbours(neighbours):
        options = MeasureOptions(rounds, memory, quick)
        rows, is_interrupted = _run(cases, options, benchmark_json, console)
    described = machine.describe() | ({"neighbours": neighbours} if neighbours else {})
    timed = dict.fromkeys((row.library, row.dtype) for row in rows if row.seconds)
    rates = [machine.rates(lib, selection.device, d, quick=quick)._asdict() for lib, d in timed]
    record = BenchRecord(machine.now(), described, rates, rows)
    print_record(record, console)
    if save is not None:
        record.save(save)
        console.print(f"saved to {save}", markup=False, soft_wrap=True)
    if plot is not None:
        from precondattn_conformance.bench.plot import draw

        for path in draw(record, plot):
            console.print(f"drew {path}", markup=False, soft_wrap=True)
    if is_interrupted:
        missing = len(cases) - len(rows)
        console.print(f"[red]interrupted[/red]: {missing} of {len(cases)} cases were not measured")
        return 130
    statuses = {row.status for row in rows}
    if TIMED not in statuses:
        console.print("[red]nothing was measured, which counts as a failure[/red]")
    return 0 if TIMED in statuses and not statuses & {WRONG, FAILED} else 1


def _require(cases: list[BenchCase], selection: Selection, *, draws: bool) -> None:
    """Raise an error if a backend, peer or device does not exist, or an extra is missing."""
    for backends in selection.backends:
        for name in backends.split(","):
            discover().named(name)
    for module in ("pytest_benchmark", *(("matplotlib",) if draws else ())):
        require_extra(module)
    for name in dict.fromkeys(case.library for case in cases):
        if name not in libraries.installed():
            raise ImportError(
                f"cases on {name} were requested, which can not be used here; install "
                f"precondattn with its extra {name!r}, or choose others with --library"
            )
    libraries.require_device((case.library for case in cases), selection.device)
    require_peers(cases, selection.peers or ())


def require_extra(module: str) -> None:
    """Raise an error if a module of the extra `bench` is not installed."""
    if not is_installed(module):
        raise ImportError(
            f"benchmarks need {module.replace('_', '-')}, which is not installed; install "
            f"precondattn with its extra 'bench'"
        )


def require_peers(cases: list[BenchCase], names: tuple[str, ...]) -> None:
    """Raise an error if a peer does not exist, or is not one of a requested mechanism."""
    from precondattn_conformance.bench.peers import peers_of

    for case in cases if names else ():
        fitting = {peer.name for peer in peers_of(case)}
        for name in names:
            if name not in fitting:
                raise ValueError(f"{name} is no peer of {case.mechanism}")


def _run(
    cases: list[BenchCase], options: MeasureOptions, benchmark_json: Path | None, console: Console
) -> tuple[list[Row], bool]:
    """The rows, from a pytest run that does not use the user's configuration.

    The second result is whether the run was interrupted.
    """
    import pytest

    from precondattn_conformance.bench.timed_suite import Collector

    progress, output = Progress(console, len(cases)), io.StringIO()
    collector = Collector(cases, options, progress)
    isolated = _isolated(console, output)
    with tempfile.TemporaryDirectory() as folder, isolated, progress:
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
    if code == pytest.ExitCode.INTERRUPTED:
        return collector.rows, True
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        console.print(output.getvalue(), markup=False, soft_wrap=True)
    if len(collector.rows) < len(cases):
        raise RuntimeError(f"the benchmark run stopped after {len(collector.rows)} rows")
    return collector.rows, False


@contextlib.contextmanager
def _isolated(console: Console, output: io.StringIO) -> Iterator[None]:
    """pytest reads none of the user's settings, and only the console writes to the terminal."""
    console.file = console.file
    with patch.dict(os.environ), contextlib.redirect_stdout(output):
        for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_XDIST_WORKER"):
            os.environ.pop(name, None)
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        yield


@contextlib.contextmanager
def _busy_neighbours(count: int) -> Iterator[None]:
    """While the context lasts, `count` processes each compute on a core."""
    running = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def compare(old: Path, new: Path, threshold: float, console: Console) -> int:
    """Print what changed between two records; the exit code is 1 if something regressed."""
    before, after = load(old), load(new)
    for difference in machines_differ(before, after):
        console.print(f"[yellow]the machines differ[/yellow] in {escape(difference)}")
    changed = changes(before, after, threshold)
    console.print(changes_table(changed))
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
