"""The outcomes of a row and a check as a cell of the table: one of six words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from precondattn_conformance.report.printable import printable
from precondattn_conformance.report.refusal import in_few_words
from precondattn_conformance.runner import Outcome
from precondattn_conformance.status import COMPARED, FAILED, UNSUPPORTED

if TYPE_CHECKING:
    from precondattn.json_types import Json

RIGHT = "right"
WRONG = "wrong"
NOT_FINITE = "not finite"
"""The status of a cell whose failures are all NaN or infinite where the definition is finite."""
CONVENTION = "convention differs"
"""The status of a cell whose failures are all due to conventions that are not kept."""
DECLINED = "declined"
NOT_COMPARED = "not compared"
"""The status of a cell whose project is not installed, or can not run on this machine."""

RED = (WRONG, NOT_FINITE)
WORST_FIRST = (WRONG, NOT_FINITE, CONVENTION, RIGHT, DECLINED, NOT_COMPARED)

LONGEST = 300
"""The largest number of characters of a reason."""


@dataclass(frozen=True)
class TableCell:
    """A cell of the table: the status of a check of a row, and how much of it was compared."""

    word: str
    cases: int = 0
    compared: int = 0
    failed: int = 0
    reason: str = ""
    """The first failure; if nothing was compared, the most common reason why not."""
    conventions: tuple[str, ...] = ()
    """The conventions that are not kept and that explain failures."""

    def as_list(self) -> list[Json]:
        """The cell in a record, without empty texts at the end."""
        cell: list[Json] = [self.word, self.cases, self.compared, self.failed]
        texts: list[Json] = [self.reason, *self.conventions]
        return cell + (texts if any(texts) else [])

    @classmethod
    def from_list(cls, cell: Sequence[Json]) -> TableCell:
        word, cases, compared, failed, *texts = cell
        return cls(word, cases, compared, failed, "".join(texts[:1]), tuple(texts[1:]))


def cells_of(
    outcomes: Iterable[Outcome], conventions: Mapping[str, tuple[str, ...]]
) -> dict[str, TableCell]:
    """The cells of a row by check. `conventions` explain failures, by the ids of the failed cases.

    If nothing in a row was compared, its cells are *not compared*: this machine can not run it.
    """
    by_check: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_check.setdefault(outcome.case.check, []).append(outcome)
    nothing = not any(o.status in COMPARED for of_check in by_check.values() for o in of_check)
    return {
        check: _cell(of_check, conventions, NOT_COMPARED if nothing else DECLINED)
        for check, of_check in by_check.items()
    }


def _cell(
    outcomes: list[Outcome], conventions: Mapping[str, tuple[str, ...]], if_none: str
) -> TableCell:
    compared = [each for each in outcomes if each.status in COMPARED]
    failed = [each for each in compared if each.status == FAILED]
    unexplained = [each for each in failed if each.case.id not in conventions]
    if not compared:
        word = if_none
    elif not failed:
        word = RIGHT
    elif not unexplained:
        word = CONVENTION
    elif all(map(is_not_finite, unexplained)):
        word = NOT_FINITE
    else:
        word = WRONG
    return TableCell(
        word,
        len(outcomes),
        len(compared),
        len(failed),
        _short(_reason(unexplained or failed, compared, outcomes)),
        tuple(dict.fromkeys(c for o in failed for c in conventions.get(o.case.id, ()))),
    )


def _reason(
    failed: Sequence[Outcome], compared: Sequence[Outcome], outcomes: Sequence[Outcome]
) -> str:
    """The reason of the first failure or, if nothing was compared, the most common reason."""
    if failed or compared:
        return failed[0].reason if failed else ""
    reasons = Counter(in_few_words(o.reason) for o in outcomes if o.status == UNSUPPORTED)
    return max(reasons, key=reasons.__getitem__, default="")


def is_not_finite(failure: Outcome) -> bool:
    """Whether a failure is NaN or infinite where the definition is finite."""
    return failure.measured is not None and not math.isfinite(failure.measured.error)


def _short(text: str) -> str:
    text = printable(text).partition("\n")[0]
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def together(cells: Iterable[TableCell]) -> TableCell | None:
    """Several checks as one column: the worst status and summed counts; None without any."""
    each = list(cells)
    if not each:
        return None
    word = min((cell.word for cell in each), key=WORST_FIRST.index)
    return TableCell(
        word,
        sum(cell.cases for cell in each),
        sum(cell.compared for cell in each),
        sum(cell.failed for cell in each),
        conventions=tuple(dict.fromkeys(name for cell in each for name in cell.conventions)),
    )
