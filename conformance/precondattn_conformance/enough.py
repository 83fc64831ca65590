"""How much of each check was compared, and whether that is enough.

A backend that declines half of a check's cases is not shown to be right by the rest. So a run of a
named backend fails if fewer than half of a check's cases were compared, of the mechanisms of which
it compared anything, unless the rest is declared (`declines.py`) or listed with `--skip`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from precondattn.json_types import JsonObject
from precondattn_conformance.declines import reason_for
from precondattn_conformance.report.refusal import in_few_words
from precondattn_conformance.runner import Outcome
from precondattn_conformance.status import COMPARED, UNSUPPORTED

LEAST = 0.5
SHOWN = 3
"""The number of reasons that are named."""


@dataclass
class CheckShare:
    """How many cases of a check were compared, and why others were not."""

    check: str
    compared: int = 0
    declined: Counter[str] = field(default_factory=Counter)
    """The declined cases, by the backend's reason."""
    declared: Counter[str] = field(default_factory=Counter)
    """The declined cases, by the reason that was declared."""

    @property
    def expected(self) -> int:
        """How many would be compared if no more were declined than is declared."""
        return self.compared + self.declined.total()

    @property
    def total(self) -> int:
        return self.expected + self.declared.total()

    @property
    def is_enough(self) -> bool:
        return self.compared >= LEAST * self.expected

    @property
    def why(self) -> str:
        """Why others were not compared, in few words; empty if all were."""
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
    """The share of each check, where `parts` are declared; a skipped case is no part of it."""
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
    """What to say of a run that compared too little of a check; nothing if it was enough."""
    few = [share for share in found if not share.is_enough]
    if not few:
        return []
    names = ", ".join(f"{s.check} {s.compared} of {s.expected}" for s in few)
    reasons: Counter[str] = sum((share.declined for share in few), Counter())
    return [
        f"too little was compared, less than half: {names}",
        f"  most often because: {_listed(reasons, SHOWN)}",
        f'  If that is meant, say why: the backend by declines = ("{few[0].check}: why",), or the '
        f'run by --declines "{few[0].check}: why" (in pytest --precondattn-declines). In place of '
        f"a check, it may be a dtype, a mask, a verb such as extend, or grouped_heads.",
    ]


def print_shares(found: Iterable[CheckShare], console: Console) -> None:
    """A table of the checks of which a part was not compared."""
    rows = [
        (share, (share.check, f"{share.compared} of {share.total}"))
        for share in found
        if share.compared < share.total
    ]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    # A long reason is cut, and not the columns before it.
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
    """`has no float64 (12), raised ValueError (4), …`."""
    named = [f"{why} ({count})" for why, count in reasons.most_common(most)]
    return ", ".join([*named, "…"] if len(reasons) > most else named)
