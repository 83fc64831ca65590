"""`precondattn conformance`: cases with live progress, a table, the failures, an exit code."""

from __future__ import annotations

from collections import defaultdict

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from precondattn_conformance.case import CHECKS, cases
from precondattn_conformance.runner import (
    FAILED,
    PASSED,
    UNSUPPORTED,
    Outcome,
    Report,
    run_cases,
)

SHOWN_FAILURES = 10


def conformance(
    *,
    backend: tuple[str, ...],
    level: str,
    device: str | None,
    libraries: tuple[str, ...],
    mechanisms: tuple[str, ...],
    checks: tuple[str, ...],
    dtypes: tuple[str, ...],
    console: Console,
) -> int:
    """Run the suite and print what came of it; the exit code is 0, or 1 for a failure.

    A run in which nothing was compared has failed: a backend that refuses everything is not right.
    """
    todo = list(
        cases(
            level,
            only_libraries=libraries,
            only_mechanisms=mechanisms,
            only_checks=checks,
            only_dtypes=dtypes,
        )
    )
    with Progress(
        TextColumn("{task.description:<18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[failed]} failed"),
        console=console,
        transient=True,
    ) as progress:
        task = progress.add_task("starting", total=len(todo), failed=0)
        failed = 0

        def advance(outcome: Outcome) -> None:
            nonlocal failed
            failed += outcome.status == FAILED
            where = f"{outcome.case.library} {outcome.case.dtype}"
            progress.update(task, advance=1, description=where, failed=failed)

        report = run_cases(todo, backend or None, device, advance)
    _print_table(report, console)
    _print_failures(report, console)
    _print_verdict(report, backend, console)
    return 0 if report.is_good else 1


def _print_table(report: Report, console: Console) -> None:
    """Worst error as a share of its bound, by library, dtype and check."""
    table = Table(title="worst error / bound", title_justify="left")
    for heading in ("library", "dtype"):
        table.add_column(heading)
    for check in CHECKS:
        table.add_column(check, justify="right")
    cells: dict[tuple[str, str], dict[str, list[Outcome]]] = defaultdict(lambda: defaultdict(list))
    for outcome in report.outcomes:
        case = outcome.case
        cells[case.library, case.dtype][case.check].append(outcome)
    for (library, dtype), row in cells.items():
        table.add_row(library, dtype, *(_cell(row[check]) for check in CHECKS))
    console.print(table)


def _cell(outcomes: list[Outcome]) -> str:
    if not outcomes:
        return "–"
    failed = sum(outcome.status == FAILED for outcome in outcomes)
    if failed:
        return f"[red]{failed} of {len(outcomes)} failed[/red]"
    shares = [o.measured.error / o.measured.bound for o in outcomes if o.measured is not None]
    if not shares:
        return f"[yellow]{len(outcomes)} unsupported[/yellow]"
    return f"[green]{len(shares)} ok[/green] {max(shares):.0e}"


def _print_failures(report: Report, console: Console) -> None:
    failures = [outcome for outcome in report.outcomes if outcome.status == FAILED]
    for outcome in failures[:SHOWN_FAILURES]:
        console.print(f"[red]failed[/red] {escape(outcome.case.id)}", soft_wrap=True)
        console.print(f"  {escape(outcome.reason)}", soft_wrap=True)
    if len(failures) > SHOWN_FAILURES:
        console.print(f"… and {len(failures) - SHOWN_FAILURES} more")
    refusals = {o.reason for o in report.outcomes if o.status == UNSUPPORTED}
    for reason in sorted(refusals)[:SHOWN_FAILURES]:
        console.print(f"[yellow]unsupported[/yellow] {escape(reason)}", soft_wrap=True)


def _print_verdict(report: Report, backend: tuple[str, ...], console: Console) -> None:
    counts = (f"{report.count(status)} {status}" for status in (PASSED, FAILED, UNSUPPORTED))
    who = ", ".join(backend) or "the backends chosen by default"
    console.print(f"{who}: {', '.join(counts)}")
    if not report.count(PASSED) and not report.count(FAILED):
        console.print("[red]nothing was compared, which counts as a failure[/red]")
