"""The subcommand `ecosystem`: run the rows, judge them, and write the table and its page."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

from rich.console import Console

from precondattn_conformance.design.levels import LEVELS
from precondattn_conformance.ecosystem.cells import WORST_FIRST
from precondattn_conformance.ecosystem.contenders import contenders
from precondattn_conformance.ecosystem.judgement import require_true
from precondattn_conformance.ecosystem.judgements import JUDGEMENTS
from precondattn_conformance.ecosystem.page import page as page_of
from precondattn_conformance.ecosystem.run import SECONDS, run_all
from precondattn_conformance.ecosystem.table import Table, TableRow, row_of
from precondattn_conformance.writable import require_writable


def ecosystem(
    console: Console,
    *,
    patterns: tuple[str, ...] = (),
    level: str = LEVELS[0],
    jobs: int = 2,
    seconds: float = SECONDS,
    record: Path | None = None,
    page: Path | None = None,
) -> None:
    """Run all rows, or those that match a pattern.

    Raises
    ------
    ValueError
        for a pattern that matches no row, an unknown level, or a file that can not be written; and
        after the run if a judgement is stale. The table is written before that.
    """
    if level not in LEVELS:
        raise ValueError(f"level is one of {', '.join(LEVELS)}; found {level!r}")
    require_writable(record, page)
    rows = contenders(patterns)
    table, began = Table(level, patterns), time.monotonic()
    for contender, ran in run_all(rows, level, jobs=jobs, seconds=seconds):
        row = row_of(contender, ran)
        table.rows.append(row)
        done = f"{len(table.rows)} of {len(rows)}"
        console.print(f"{done}: {_in_a_line(row)}", markup=False, highlight=False, soft_wrap=True)
    order = {contender.name: i for i, contender in enumerate(rows)}
    table.rows.sort(key=lambda row: order[row.name])
    table.seconds = time.monotonic() - began
    if record is not None:
        table.save(record)
    if page is not None:
        page.write_text(page_of(table, JUDGEMENTS), encoding="utf-8")
    require_true(table, JUDGEMENTS)


def _in_a_line(row: TableRow) -> str:
    """A row in the terminal: how many checks have each status, and which have the worst."""
    words = Counter(cell.word for cell in row.checks.values())
    counts = ", ".join(
        f"{words[word]} {word}" + _names(row, word) for word in WORST_FIRST if words[word]
    )
    return f"{row.name} ({row.seconds:.0f} s): {counts or row.missing}"


def _names(row: TableRow, word: str) -> str:
    if word not in WORST_FIRST[:3]:
        return ""
    return f" ({', '.join(check for check, cell in row.checks.items() if cell.word == word)})"
