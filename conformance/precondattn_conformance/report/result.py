"""The result of a case as plain data, from a run or from a file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from precondattn_conformance.report.printable import printable
from precondattn_conformance.status import COMPARED, STATUSES

if TYPE_CHECKING:
    from precondattn.json_types import Json, JsonObject
    from precondattn_conformance.runner import Outcome

NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf}
"""Texts for errors that JSON can not represent as numbers."""
TEXTS = ("reason", "details", "snippet", "alone", "outputs_only")
"""Fields that are left out of an entry if they are empty."""


@dataclass(frozen=True)
class Result:
    """The result of one case. `error` and `bound` are None if nothing was measured."""

    id: str
    check: str
    mechanism: str
    library: str
    dtype: str
    layout: str
    kind: str
    status: str
    error: float | None = None
    bound: float | None = None
    outputs_only: str = ""
    """The reason why no gradients were compared, in a check that also compares gradients."""
    seconds: float = 0.0
    reason: str = ""
    details: str = ""
    snippet: str = ""
    alone: str = ""
    """The status of a failed case when it was replayed alone in a new process."""
    after: tuple[str, ...] = ()
    """The ids of the earlier cases after which the case fails, if it passes alone."""

    @classmethod
    def of_outcome(cls, outcome: Outcome | Result) -> Result:
        """The result of an outcome of the runner."""
        if isinstance(outcome, Result):
            return outcome
        case, measured = outcome.case, outcome.measured
        texts = {name: getattr(case, name) for name in ("id", "check", "mechanism", "library")}
        texts |= {"dtype": case.dtype, "layout": case.layout.name, "kind": case.kind}
        texts |= {name: getattr(outcome, name) for name in ("reason", "details", "snippet")}
        values: JsonObject = {name: printable(text) for name, text in texts.items()}
        if measured is not None:
            values |= {"error": float(measured.error), "bound": float(measured.bound)}
            values["outputs_only"] = printable(measured.outputs_only)
        values |= {"status": outcome.status, "alone": outcome.alone}
        after = tuple(map(printable, outcome.after))
        return cls(**values, seconds=float(outcome.seconds), after=after)

    @classmethod
    def from_json(cls, entry: JsonObject) -> Result:
        """A result from its entry in a record. Unknown fields are ignored.

        Raises
        ------
        KeyError, TypeError, ValueError
            if the entry is invalid.
        """
        values: JsonObject = {}
        for field in fields(cls):
            if field.name in ("error", "bound"):
                value: Json = entry.get(field.name)
                number: Json = NOT_FINITE.get(value, value)
                values[field.name] = None if number is None else float(number)
            elif field.name == "seconds":
                values[field.name] = float(entry["seconds"])
            elif field.name == "after":
                values["after"] = tuple(map(printable, entry.get("after", ())))
            elif field.name in TEXTS:
                values[field.name] = printable(entry.get(field.name, ""))
            else:
                values[field.name] = printable(entry[field.name])
        if values["status"] not in STATUSES:
            raise ValueError(f"{values['status']!r} is no status; there are {', '.join(STATUSES)}")
        return cls(**values)

    def to_json(self) -> JsonObject:
        """The result's entry in a record, without empty fields."""
        entry: JsonObject = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "seconds":
                entry["seconds"] = round(value, 5)
            elif isinstance(value, float) and not math.isfinite(value):
                entry[field.name] = "NaN" if math.isnan(value) else "Infinity"
            elif field.name == "after":
                entry |= {"after": list(value)} if value else {}
            elif value is not None and value != "":
                entry[field.name] = value
        return entry

    @property
    def share(self) -> float | None:
        """The ratio of the error to its bound: at most 1 if the case passed."""
        if self.error is None or self.bound is None:
            return None
        if self.bound == 0:
            return 0.0 if self.error == 0 else math.inf
        return self.error / self.bound

    @property
    def is_compared(self) -> bool:
        """Whether the backend gave a result that was compared with the oracle."""
        return self.status in COMPARED

    @property
    def headline(self) -> str:
        """The first line of the reason; of a traceback the last line, the exception."""
        lines = self.reason.strip().splitlines() or [""]
        return lines[-1 if lines[0].startswith("Traceback") else 0].strip()


def worst(results: Iterable[Result]) -> Result | None:
    """The result with the largest ratio of error to bound; NaN counts as the largest."""
    measured = [(share, result) for result in results if (share := result.share) is not None]
    if not measured:
        return None
    return max(measured, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])[1]


def share_text(share: float) -> str:
    """An error / bound in at most five characters: `<1%`, `12%`, `100%`, `3.1x`, `4e3x`."""
    if math.isnan(share):
        return "NaN"
    if math.isinf(share):
        return "inf"
    if share == 0:
        return "0"
    if share < 0.01:
        return "<1%"
    if share <= 1:
        return f"{100 * share:.0f}%"
    if share < 1.1:
        return f"{share:.2f}x"
    if share < 100:
        return f"{share:.2g}x"
    if share < 1000:
        return f"{share:.0f}x"
    digits, _, exponent = f"{share:.0e}".partition("e")
    return f"{digits}e{int(exponent)}x"


def error_text(result: Result) -> str:
    """The error in words: `error 3.2e-06 of 2e-05 allowed (16%)`; empty if nothing was measured."""
    if result.error is None or result.bound is None or result.share is None:
        return ""
    error = f"{result.error:.2g}".replace("nan", "NaN")
    return f"error {error} of {result.bound:.2g} allowed ({share_text(result.share)})"
