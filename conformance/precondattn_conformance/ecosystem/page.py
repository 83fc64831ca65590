"""The table as a Markdown page: rows by project, and below them the meaning of the red cells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from textwrap import fill

from precondattn_conformance.conventions import MEANING
from precondattn_conformance.ecosystem.cells import (
    CONVENTION,
    NOT_COMPARED,
    NOT_FINITE,
    RED,
    RIGHT,
    TableCell,
    together,
)
from precondattn_conformance.ecosystem.judgement import (
    CONVENTIONAL,
    DEFECT,
    LIMIT,
    Judgement,
)
from precondattn_conformance.ecosystem.table import Table, TableRow

WIDTH = 110
"""The line width of a paragraph."""

OTHER = "other"
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "outputs": ("outputs",),
    "gradients": ("gradients",),
    "states": ("caching", "splits", "alternation", "cache_operations", "states"),
    "masks": ("packing", "padding", "future"),
    "stability": ("stability",),
}
"""The checks in each column; the last column has all others."""
SHORT = {NOT_FINITE: "infinite", CONVENTION: "convention", NOT_COMPARED: "–"}
"""The words of a record that the page shortens."""

HEAD = """\
# The ecosystem under test

This page shows what the [conformance suite](conformance.md) finds in public implementations of the
mechanisms, and in our own backends. `docs/make_pages.py` writes it from a saved run, which
these commands repeat:

```console
$ precondattn ecosystem --install    # prints what to install and to check out
$ precondattn ecosystem --record ecosystem.json --page ecosystem.md
$ precondattn ecosystem --peer 'fla/*' --level full
```

A project on a package index is tested as installed, without its dependencies; others in a checkout
of their repository, in the folder named by `PRECONDATTN_CHECKOUTS`. No code of a project is copied:
a short adapter gives a function our names of inputs ([Check a function](check_a_function.md)).
"""

HOW_TO_READ = """\
## How to read it

| cell | meaning |
|---|---|
| ✓ | every compared case agrees with the definition |
| 5/9 | 5 cases agree, and 4 were declined |
| wrong 2/5 | 2 of 5 compared cases disagree |
| infinite | every wrong result is NaN or infinite where the definition is finite |
| convention | all failed cases need a convention, listed below, that is not kept |
| declined | the function has no parameter for it, or raises an error |
| – | the mechanism has no such case, or the project can not run here; reasons are at the end |

A cell in bold was examined and judged to be a *limit* (L, which the project documents), a
*convention* (C, one of two in use), or a *defect* (D, a contradiction to the project's own
description). Cells that are not yet examined say so: the fault may be the function's, the adapter's
or ours. `precondattn conformance --peer NAME` repeats a row, and prints code that reproduces each
failure.

"""

COLUMNS_HEAD = """\
"states" are caches and recurrent states; "masks" are packed and padded sequences, and causality;
"other" includes dtypes, determinism, order in memory, threads and refusals.

"""


def page(table: Table, judgements: Sequence[Judgement]) -> str:
    """The whole page as Markdown."""
    parts = [HEAD, _summary(table), HOW_TO_READ + COLUMNS_HEAD]
    numbers = _numbers(table, judgements)
    for _, rows in groupby(table.rows, key=lambda row: row.project):
        parts.append(_project(list(rows), numbers))
    parts += _notes(table, numbers)
    parts += _not_looked_at(table, numbers)
    parts += _not_compared(table)
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _numbers(table: Table, judgements: Sequence[Judgement]) -> dict[Judgement, str]:
    """The name of each judgement in the table, such as "defect 2", also of adapters' limits."""
    of_rows = [each for each in judgements if each.rows(table)]
    numbers: dict[Judgement, str] = {}
    counts: dict[str, int] = {}
    for judgement in (*of_rows, *_limits(table, of_rows)):
        counts[judgement.kind] = counts.get(judgement.kind, 0) + 1
        numbers[judgement] = f"{judgement.kind} {counts[judgement.kind]}"
    return numbers


def _limits(table: Table, judgements: Sequence[Judgement]) -> Iterator[Judgement]:
    """The limits that adapters declare, for red cells without a judgement."""
    for row in table.rows:
        for check, sentence in row.limits.items():
            cell = row.checks.get(check)
            is_red = cell is not None and cell.word in RED
            if is_red and not any(each.is_of(row, check) for each in judgements):
                yield Judgement(row.name, (check,), LIMIT, sentence)


def _summary(table: Table) -> str:
    versions = table.environment["versions"]
    assert isinstance(versions, dict)
    with_versions = ", ".join(f"{name} {version}" for name, version in versions.items())
    projects = len({row.project for row in table.rows})
    compared = [row for row in table.rows if any(c.compared for c in row.checks.values())]
    red = [row for row in compared if any(c.word in RED for c in row.checks.values())]
    return (
        f"Run on {table.date} at the level `{table.level}`, with {with_versions}, in "
        f"{table.seconds / 60:.0f} minutes on {table.environment['processor']}: {len(table.rows)} "
        f"implementations of {projects} projects. {len(compared)} were compared, and "
        f"{len(red)} of these have a cell in bold.\n"
    )


def _project(rows: list[TableRow], numbers: Mapping[Judgement, str]) -> str:
    row = rows[0]
    dates = {" of ".join(filter(None, (row.version, row.date))) for row in rows} - {""}
    heading = ", ".join(sorted(dates)) or "not installed"
    lines = [
        f"## {row.project}\n",
        f"[{heading}]({row.url})\n" if row.url else f"{heading}\n",
        table_of(
            ("function", "mechanism", *COLUMNS, OTHER),
            [_cells(row, numbers, len({each.library for each in rows}) > 1) for row in rows],
        ),
    ]
    return "\n".join(lines)


def _cells(row: TableRow, numbers: Mapping[Judgement, str], named: bool) -> tuple[str, ...]:
    """The cells of a row; its library is `named` where a project has several."""
    name = f"`{row.name.partition('/')[2]}`" + (f", {row.library}" if named else "")
    texts = [_text(row, checks, numbers) for checks in columns(row.checks).values()]
    return name, f"`{row.mechanism}`", *texts


def columns(checks: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The checks of a row, grouped by column."""
    names = tuple(checks)
    by_column = {
        column: tuple(check for check in of_column if check in names)
        for column, of_column in COLUMNS.items()
    }
    named = {check for of_column in COLUMNS.values() for check in of_column}
    return {**by_column, OTHER: tuple(check for check in names if check not in named)}


def _text(row: TableRow, checks: Sequence[str], numbers: Mapping[Judgement, str]) -> str:
    """A cell of the page: the status, how much was compared, and the judgement."""
    cell = together(row.checks[check] for check in checks)
    if cell is None:
        return "–"
    notes = [
        f"[{name[0].upper()}{name.partition(' ')[2]}](#{_anchor(name)})"
        for judgement, name in numbers.items()
        if any(judgement.is_of(row, check) for check in checks)
    ]
    if any(row.checks[c].word in RED and not _is_judged(row, c, numbers) for c in checks):
        notes.append("not yet examined")
    return " ".join([_word(cell), *notes])


def _word(cell: TableCell) -> str:
    word = SHORT.get(cell.word, cell.word)
    if cell.word in (*RED, CONVENTION):
        text = f"{word} {cell.failed}/{cell.compared}"
        return f"**{text}**" if cell.word in RED else text
    if cell.word == RIGHT:
        return f"{cell.compared}/{cell.cases}" if cell.compared < cell.cases else "✓"
    return word


def _is_judged(row: TableRow, check: str, numbers: Iterable[Judgement]) -> bool:
    return any(judgement.is_of(row, check) for judgement in numbers)


def _anchor(name: str) -> str:
    return name.replace(" ", "-")


def _notes(table: Table, numbers: Mapping[Judgement, str]) -> Iterator[str]:
    """The judgements by kind, and the conventions that the suite found by itself."""
    for kind, heading in ((DEFECT, "Defects"), (LIMIT, "Limits"), (CONVENTIONAL, "Conventions")):
        notes = [_note(table, j, name) for j, name in numbers.items() if j.kind == kind]
        notes += _conventions(table) if kind == CONVENTIONAL else []
        if notes:
            yield "\n".join([f"## {heading}\n", *notes])


def _note(table: Table, judgement: Judgement, name: str) -> str:
    where = ", ".join(f"`{row.name}`" for row in judgement.rows(table))
    text = f"**{name.capitalize()}**, {where}. {judgement.sentence}"
    return "\n".join([f"({_anchor(name)})=", "", wrapped(text), ""])


def wrapped(text: str) -> str:
    """A paragraph wrapped into lines."""
    return fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _conventions(table: Table) -> list[str]:
    by_name: dict[str, list[str]] = {}
    for row in table.rows:
        names = [name for cell in row.checks.values() for name in cell.conventions]
        for name in dict.fromkeys(names):
            by_name.setdefault(name, []).append(f"`{row.name}`")
    rows = [(f"`{name}`: {MEANING[name]}", str(len(of))) for name, of in by_name.items()]
    return [table_of(("convention", "functions that do not keep it"), rows)] if rows else []


def _not_looked_at(table: Table, numbers: Mapping[Judgement, str]) -> Iterator[str]:
    rows = [
        (
            f"`{row.name}`",
            check,
            cell.reason,
            "; ".join(row.findings),
        )
        for row in table.rows
        for check, cell in row.checks.items()
        if cell.word in RED and not _is_judged(row, check, numbers)
    ]
    if rows:
        headings = ("implementation", "check", "the first failure", "what it computes instead")
        yield f"## Not yet examined\n\n{table_of(headings, rows)}"


def _not_compared(table: Table) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for row in table.rows:
        if row.missing:
            reasons.setdefault(row.missing, []).append(f"`{row.name}`")
    if reasons:
        rows = [(", ".join(names), reason) for reason, names in reasons.items()]
        yield f"## Not compared\n\n{table_of(('implementations', 'why'), rows)}"


def table_of(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    lines += [f"| {' | '.join(text.replace('|', chr(92) + '|') for text in row)} |" for row in rows]
    return "\n".join(lines) + "\n"
