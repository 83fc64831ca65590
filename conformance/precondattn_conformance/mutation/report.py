"""The table of a run: the survivors, each with its change as a diff, and the counts."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from precondattn_conformance.mutation.equivalents import Known
from precondattn_conformance.mutation.record import MutantEntry, MutationRecord
from precondattn_conformance.mutation.trial import INVALID, KILLED, TIMEOUT, UNTOUCHED

EQUIVALENT, SURVIVOR, NOT_RUN = "equivalent", "survivor", "not run"


def kind_of(entry: MutantEntry, is_equivalent: bool) -> str:
    """The column in which a mutant is counted."""
    if entry.is_killed or entry.status == INVALID:
        return entry.status
    if is_equivalent:
        return EQUIVALENT
    return SURVIVOR if entry.status else NOT_RUN


def counts(record: MutationRecord, known: Known) -> dict[str, Counter[str]]:
    """The number of mutants with each result, by target."""
    return {
        target: Counter(kind_of(e, (target, e.key) in known) for e in entries.values())
        for target, entries in record.entries.items()
    }


def survivors(record: MutationRecord, known: Known) -> dict[str, list[MutantEntry]]:
    """The mutants that no case has killed and that are not listed as equivalent, by target."""
    return {
        target: [e for e in entries.values() if kind_of(e, (target, e.key) in known) == SURVIVOR]
        for target, entries in record.entries.items()
    }


def print_survivors(record: MutationRecord, known: Known, console: Console) -> None:
    """Print each survivor's line and change."""
    for target, found in survivors(record, known).items():
        if not found:
            continue
        table = Table("line", "function", "change", "", title=f"survivors of {target}")
        table.title_justify = "left"
        for entry in found:
            change = f"[red]- {escape(entry.before)}[/red]\n[green]+ {escape(entry.after)}[/green]"
            why = "no case runs it" if entry.status == UNTOUCHED else entry.kind
            table.add_row(str(entry.line), escape(entry.function), change, why)
        console.print(table)


def print_counts(record: MutationRecord, known: Known, console: Console) -> None:
    """Print a row for each target: the number of mutants, and the counts of results."""
    columns = (KILLED, TIMEOUT, EQUIVALENT, SURVIVOR, INVALID, NOT_RUN)
    numbers = counts(record, known)
    shown = [c for c in columns if c in (KILLED, SURVIVOR) or any(n[c] for n in numbers.values())]
    table = Table("target", "mutants", *shown)
    for target, number in numbers.items():
        if number:
            cells = (str(number[column]) for column in shown)
            table.add_row(escape(target), str(number.total()), *cells)
    console.print(table)
