"""The matrix in the terminal, mechanisms × checks: the largest error relative to its bound.

Mechanisms of one family that pass share a line; a mechanism that fails has its own lines, one for
each library and dtype in which it fails. Checks that do not fit side by side follow below. A check
that compared nothing has no column; the line below the matrix says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from precondattn_conformance.report.cells import SYMBOLS, WORDS, Cell, by_family, grouped_by
from precondattn_conformance.report.result import Result
from precondattn_conformance.status import FAILED, PASSED, UNSUPPORTED, XFAILED

if TYPE_CHECKING:
    from precondattn_conformance.runner import Outcome

STYLES = {PASSED: "green", FAILED: "bold red", XFAILED: "magenta", UNSUPPORTED: "yellow"}
WIDEST_NAME = 34
PADDING = 2
"""The number of blanks between columns."""

LINES_OF_A_MECHANISM = 6
MOST_NAMES = 40

Rows = list[tuple[str, list[Result]]]
"""Lines of the matrix: the name and the results of each."""


class Band:
    """Checks that are printed side by side, and their rows."""

    def __init__(self, what: str, checks: Sequence[str], rows: Rows) -> None:
        self.rows, self.headings = rows, list(checks)
        self.cells = [[Cell(r for r in group if r.check == c) for c in checks] for _, group in rows]
        self.texts = [[cell.text for cell in row] for row in self.cells]
        longest = max((len(name) for name, _ in rows), default=0)
        self.width_of_names = max(min(longest, WIDEST_NAME), len(what))

    @property
    def width(self) -> int:
        columns = zip(self.headings, *self.texts, strict=True)
        return self.width_of_names + sum(max(map(len, each)) + PADDING for each in columns)


def matrix(outcomes: Iterable[Result | Outcome], console: Console) -> None:
    """Print the outcomes of a run."""
    results = [Result.of_outcome(outcome) for outcome in outcomes]
    if not results:
        console.print("no cases were run")
        return
    datasets = grouped_by(results, _place)
    is_split = len(datasets) > 1
    if is_split:
        _print(
            "library, dtype",
            results,
            lambda group: list(grouped_by(group, _place).items()),
            console,
        )
    _print("mechanism", results, partial(_by_mechanism, splits=is_split), console)
    refused = _refused(results)
    if refused:
        shown = refused[:MOST_NAMES]
        more = len(refused) - len(shown)
        names = ", ".join([*shown, f"{more} others"] if more else shown)
        console.print(Text("nothing compared of ", style="yellow").append(names, style="default"))
    _print_legend(results, console)


def _by_mechanism(results: list[Result], *, splits: bool) -> Rows:
    """A line for the mechanisms of a family that pass, and lines for each one that fails."""
    rows: Rows = []
    for name, mechanisms in by_family(results).items():
        bad = {m: group for m, group in mechanisms.items() if Cell(group).status == FAILED}
        good = {m: group for m, group in mechanisms.items() if m not in bad}
        together = [result for group in good.values() for result in group]
        if any(result.is_compared for result in together):
            rows.append((_named(name, good, alone=not bad), together))
        for mechanism, group in bad.items():
            rows.append((mechanism, group))
            rows += _where_it_fails(group) if splits else []
    return rows


def _named(name: str, mechanisms: dict[str, list[Result]], *, alone: bool) -> str:
    """The name of a line: `softmax`, `lucid and 20 more`, `20 more of lucid` if some fail."""
    if len(mechanisms) == 1:
        return next(iter(mechanisms))
    if name in mechanisms:
        return f"{name} and {len(mechanisms) - 1} more"
    return f"{len(mechanisms)} of {name}" if alone else f"{len(mechanisms)} more of {name}"


def _where_it_fails(results: list[Result]) -> Rows:
    places = grouped_by(results, _place)
    bad = {place: group for place, group in places.items() if Cell(group).status == FAILED}
    rows: Rows = [(f"  {place}", group) for place, group in bad.items()]
    if len(rows) > LINES_OF_A_MECHANISM:
        rest = [result for _, group in rows[LINES_OF_A_MECHANISM - 1 :] for result in group]
        left = len(rows) - LINES_OF_A_MECHANISM + 1
        rows[LINES_OF_A_MECHANISM - 1 :] = [(f"  {left} others", rest)]
    return rows


def _refused(results: list[Result]) -> list[str]:
    """Families of which nothing was compared, and such mechanisms in other families."""
    names: list[str] = []
    for name, mechanisms in by_family(results).items():
        none = [m for m, group in mechanisms.items() if not any(r.is_compared for r in group)]
        names += [f"{name} ({len(none)})"] if len(none) == len(mechanisms) > 1 else none
    return names


def _place(result: Result) -> str:
    return f"{result.library} {result.dtype}"


def _print(
    what: str,
    results: list[Result],
    rows_of: Callable[[list[Result]], Rows],
    console: Console,
) -> None:
    for band in _bands(what, results, rows_of, console.width):
        if not band.rows:
            continue
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        table.add_column(Text(what), width=band.width_of_names, overflow="fold")
        for heading in band.headings:
            table.add_column(Text(heading), justify="right", no_wrap=True)
        for (name, _), cells, texts in zip(band.rows, band.cells, band.texts, strict=True):
            shown = (
                Text(text, style=STYLES.get(cell.status, "dim"))
                for cell, text in zip(cells, texts, strict=True)
            )
            table.add_row(Text(name, style="dim" if name[0] == " " else ""), *shown)
        console.print(table)
        console.print()


def _bands(
    what: str, results: list[Result], rows_of: Callable[[list[Result]], Rows], width: int
) -> list[Band]:
    """The checks in as few bands as the width allows."""
    by_check = grouped_by(results, lambda result: result.check)
    left = [c for c, group in by_check.items() if any(r.is_compared for r in group)]

    def band(checks: list[str]) -> Band:
        return Band(what, checks, rows_of([r for check in checks for r in by_check[check]]))

    bands = []
    while left:
        for count in range(len(left), 0, -1):
            next_band = band(left[:count])
            if next_band.width <= width or count == 1:
                break
        bands.append(next_band)
        left = left[count:]
    return bands


def _print_legend(results: list[Result], console: Console) -> None:
    """Print an explanation of the symbols that were used."""
    cell = Cell(results)
    is_measured = any(result.share is not None for result in results)
    texts = ["12% or 4x: the largest error relative to its bound"] if is_measured else []
    for status, symbol in SYMBOLS.items():
        if cell.counts[status]:
            texts.append(f"{symbol}2 {WORDS[status]}")
    console.print(Text("; ".join(texts), style="dim"))
