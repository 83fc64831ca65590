"""Whether enough was compared: the share of each check, and the coverage floor.

A backend that declines half of a check's cases is not shown to be right by the rest. So a run of a
named backend fails if it compared fewer than half of a check's cases, unless the rest is declared
(`declines.py`) or listed with `--skip`. Only mechanisms of which something was compared count.

    class Trsm(pa.Backend):
        covers = frozenset({"lucid_solve", "lucid_solve[beta=true]"})

A run also fails if it requests an expression that a backend promises in this way, and none of its
outputs is compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import precondattn as pa
from precondattn.dispatch.discovery import discover
from precondattn.json_types import JsonObject
from precondattn_conformance.case import Case
from precondattn_conformance.declines import reason_for
from precondattn_conformance.report.refusal import in_few_words
from precondattn_conformance.runner import Outcome
from precondattn_conformance.status import COMPARED, UNSUPPORTED

LEAST = 0.5
SHOWN = 3
"""The number of reasons that are listed."""


@dataclass
class CheckShare:
    """The number of compared cases of a check, and why others were not compared."""

    check: str
    compared: int = 0
    declined: Counter[str] = field(default_factory=Counter)
    """The numbers of declined cases, by the backend's reason."""
    declared: Counter[str] = field(default_factory=Counter)
    """The numbers of declined cases that are declared, by the declared reason."""

    @property
    def expected(self) -> int:
        """The number of cases to compare if only the declared ones are declined."""
        return self.compared + self.declined.total()

    @property
    def total(self) -> int:
        return self.expected + self.declared.total()

    @property
    def is_enough(self) -> bool:
        return self.compared >= LEAST * self.expected

    @property
    def why(self) -> str:
        """A short text on why the other cases were not compared; empty if all were."""
        reasons = Counter({f"{why}, as declared": n for why, n in self.declared.items()})
        return _listed(self.declined + reasons, 2)

    def __str__(self) -> str:
        return f"{self.check}: {self.compared} of {self.total} compared; {self.why}".rstrip("; ")

    def to_json(self) -> JsonObject:
        """The entry in a record."""
        return {
            "check": self.check,
            "compared": self.compared,
            "of": self.total,
            "declined": dict(self.declined.most_common()),
            "declared": dict(self.declared.most_common()),
            "is_enough": self.is_enough,
        }


def shares(
    outcomes: Sequence[Outcome], parts: Mapping[str, str], backends: tuple[str, ...] = ()
) -> list[CheckShare]:
    """The share of each check, given the declared `parts`. Skipped cases do not count."""
    used = {outcome.case.mechanism for outcome in outcomes if outcome.status in COMPARED}
    found: dict[str, CheckShare] = {}
    for outcome in outcomes:
        if outcome.case.mechanism not in used:
            continue
        share = found.setdefault(outcome.case.check, CheckShare(outcome.case.check))
        if outcome.status in COMPARED:
            share.compared += 1
        elif outcome.status == UNSUPPORTED:
            reason = reason_for(outcome, parts)
            if reason is None:
                share.declined[in_few_words(outcome.reason, backends)] += 1
            else:
                share.declared[reason] += 1
    return [share for share in found.values() if share.total]


def too_little(found: Iterable[CheckShare]) -> list[str]:
    """Messages about checks of which too little was compared; empty if it was enough."""
    few = [share for share in found if not share.is_enough]
    if not few:
        return []
    names = ", ".join(f"{s.check} {s.compared} of {s.expected}" for s in few)
    reasons: Counter[str] = sum((share.declined for share in few), Counter())
    return [
        f"too little was compared, less than half: {names}",
        f"  most often because: {_listed(reasons, SHOWN)}",
        f'  If that is intended, declare it: in the backend, declines = ("{few[0].check}: why",); '
        f'for the run, --declines "{few[0].check}: why" (in pytest --precondattn-declines). '
        f"Instead of a check, it may be a dtype, a mask, a verb such as extend, or grouped_heads.",
    ]


def below_floor(
    backend: str | None, cases: Iterable[Case], outcomes: Iterable[Outcome]
) -> list[str]:
    """A line, with the reason, for each expression that is promised but was never compared."""
    requested = {case.mechanism for case in cases if case.check == "outputs"}
    covers = discover().named(backend).covers if backend is not None else ()
    missing = requested.intersection(str(pa.parse(text)) for text in covers)
    reasons: dict[str, str] = {}
    for outcome in outcomes:
        if outcome.case.check == "outputs" and outcome.case.mechanism in missing:
            if outcome.status in COMPARED:
                missing = missing - {outcome.case.mechanism}
            else:
                reasons.setdefault(outcome.case.mechanism, outcome.reason)
    return [
        f"below its coverage floor: {backend} promises {name}, but no case of it was compared: "
        f"{reasons.get(name, 'not run')}"
        for name in sorted(missing)
    ]


def print_shares(found: Iterable[CheckShare], console: Console) -> None:
    """Print a table of the checks that were not fully compared."""
    rows = [
        (share, (share.check, f"{share.compared} of {share.total}"))
        for share in found
        if share.compared < share.total
    ]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    # A long reason is cut, rather than the columns before it.
    for i, name in enumerate(("check", "compared")):
        widest = max((len(row[i]) for _, row in rows), default=0)
        width = max(widest, len(name))
        table.add_column(name, min_width=width, no_wrap=True, justify="right" if i else "left")
    table.add_column("not compared", no_wrap=True, overflow="ellipsis")
    for share, row in rows:
        style = "" if share.is_enough else "red"
        table.add_row(*(Text(text, style=style) for text in row), Text(share.why))
    if rows:
        console.print(table)
        console.print()


def _listed(reasons: Counter[str], most: int) -> str:
    """Reasons with counts: `has no float64 (12), raised ValueError (4), …`."""
    named = [f"{why} ({count})" for why, count in reasons.most_common(most)]
    return ", ".join([*named, "..."] if len(reasons) > most else named)
