"""Judgements of red cells: a limit, a convention or a defect.

A judgement belongs to red cells. If one of them is no longer red, the judgement is stale, which is
an error. So the page never blames a version that is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from precondattn_conformance.ecosystem.cells import CONVENTION, NOT_COMPARED, RED
from precondattn_conformance.ecosystem.table import Table, TableRow

LIMIT, CONVENTIONAL, DEFECT = "limit", "convention", "defect"
"""Kinds of judgement: a documented limit; one of two conventions in use; a contradiction to its own
description."""
KINDS = (DEFECT, LIMIT, CONVENTIONAL)


class StaleError(ValueError):
    """Raised for judgements that do not belong to red cells."""


@dataclass(frozen=True)
class Judgement:
    """The cause of the red cells of some rows and checks."""

    peers: str
    """Patterns of row names, separated by spaces, such as `"fla/kda_* fla/gdn2_chunk"`."""
    checks: tuple[str, ...]
    kind: str
    sentence: str
    """The finding as a sentence with a capital letter: what happens on which input."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is one of {', '.join(KINDS)}; found {self.kind!r}")
        if not self.checks or isinstance(self.checks, str):
            raise ValueError(f"checks is a tuple of names of checks; found {self.checks!r}")

    @property
    def patterns(self) -> list[str]:
        return self.peers.split()

    def is_of(self, row: TableRow, check: str) -> bool:
        return check in self.checks and any(fnmatchcase(row.name, p) for p in self.patterns)

    def rows(self, table: Table) -> list[TableRow]:
        """The table's rows to which it applies."""
        return [row for row in table.rows if any(fnmatchcase(row.name, p) for p in self.patterns)]


def require_true(table: Table, judgements: Sequence[Judgement]) -> None:
    """Raise a StaleError unless each judgement applies to red cells."""
    faults = [fault for judgement in judgements for fault in _faults(table, judgement)]
    if faults:
        raise StaleError("\n".join(["judgements do not fit the table:", *faults]))


def _faults(table: Table, judgement: Judgement) -> Iterator[str]:
    rows = judgement.rows(table)
    for pattern in judgement.patterns:
        if not table.patterns and not any(fnmatchcase(row.name, pattern) for row in rows):
            yield f"{pattern}: no row has such a name"
    compared = [row for row in rows if any(c.word != NOT_COMPARED for c in row.checks.values())]
    for row in compared:
        for check in judgement.checks:
            cell = row.checks.get(check)
            word = "not there" if cell is None else cell.word
            if word not in (*RED, CONVENTION, NOT_COMPARED):
                yield f"{row.name}, {check}: the cell is {word}, and is judged a {judgement.kind}"
