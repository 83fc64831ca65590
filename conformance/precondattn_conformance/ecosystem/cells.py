"""The outcomes of a row and a check as a cell of the table: one of six words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from precondattn_conformance.report.printable import printable
from precondattn_conformance.report.refusal import in_few_words
from precondattn_conformance.runner import Outcome
from precondattn_conformance.status import COMPARED, FAILED, UNSUPPORTED

if TYPE_CHECKING:
    from precondattn.json_types import JsonObject

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

LISTED = 2
"""The number of failures, and of reasons for declines, that a cell keeps."""
LONGEST = 300


@dataclass(frozen=True)
class TableCell:
    """A cell of the table: the status of a check of a row, and how much of it was compared."""

    word: str
    cases: int = 0
    compared: int = 0
    failed: int = 0
    worst: float | None = None
    """The largest ratio of error to bound; infinite if a result is not finite."""
    failures: tuple[tuple[str, str], ...] = ()
    """The first failed cases, with their reasons."""
    declines: tuple[tuple[str, int], ...] = ()
    """The most common reasons why cases were declined."""
    conventions: tuple[str, ...] = ()
    """The conventions that are not kept and that explain failures."""

    def as_dict(self) -> JsonObject:
        worst = self.worst
        return {
            "cell": self.word,
            "cases": self.cases,
            "compared": self.compared,
            "failed": self.failed,
            "worst": worst if worst is None or math.isfinite(worst) else "not finite",
            "failures": [{"case": case, "reason": reason} for case, reason in self.failures],
            "declines": dict(self.declines),
            "conventions": list(self.conventions),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> TableCell:
        worst = content["worst"]
        return cls(
            content["cell"],
            content["cases"],
            content["compared"],
            content["failed"],
            math.inf if worst == "not finite" else worst,
            tuple((each["case"], each["reason"]) for each in content["failures"]),
            tuple(content["declines"].items()),
            tuple(content["conventions"]),
        )


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
    declines = Counter(in_few_words(o.reason) for o in outcomes if o.status == UNSUPPORTED)
    shares = [share for each in compared if (share := _share(each)) is not None]
    return TableCell(
        word,
        len(outcomes),
        len(compared),
        len(failed),
        max(shares, default=None),
        tuple((o.case.id, _short(o.reason)) for o in (unexplained or failed)[:LISTED]),
        tuple((_short(reason), count) for reason, count in declines.most_common(LISTED)),
        tuple(dict.fromkeys(c for o in failed for c in conventions.get(o.case.id, ()))),
    )


def is_not_finite(failure: Outcome) -> bool:
    """Whether a failure is NaN or infinite where the definition is finite."""
    return failure.measured is not None and not math.isfinite(failure.measured.error)


def _share(outcome: Outcome) -> float | None:
    """The ratio of the error to its bound."""
    measured = outcome.measured
    if measured is None or measured.bound == 0:
        return None
    return measured.error / measured.bound if math.isfinite(measured.error) else math.inf


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
        max((cell.worst for cell in each if cell.worst is not None), default=None),
        conventions=tuple(dict.fromkeys(name for cell in each for name in cell.conventions)),
    )
