"""Coverage: how many cases were compared, by mechanism and check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from precondattn.json_types import JsonObject
from precondattn_conformance.report.refusal import in_few_words
from precondattn_conformance.report.result import Result
from precondattn_conformance.status import SKIPPED, UNSUPPORTED


@dataclass
class Coverage:
    """The number of compared cases of a mechanism and check, and why others were not compared."""

    mechanism: str
    check: str
    compared: int = 0
    unsupported: Counter[str] = field(default_factory=Counter)
    """The number of declined cases by the backend's reason."""
    skipped: Counter[str] = field(default_factory=Counter)
    """The number of skipped cases by reason."""

    @property
    def total(self) -> int:
        return self.compared + self.unsupported.total() + self.skipped.total()

    def to_json(self) -> JsonObject:
        """The entry in a record, without empty fields."""
        reasons = {"unsupported": dict(self.unsupported), "skipped": dict(self.skipped)}
        entry = {"mechanism": self.mechanism, "check": self.check, "compared": self.compared}
        return {**entry, **{name: counts for name, counts in reasons.items() if counts}}


def coverage(results: Iterable[Result], backends: tuple[str, ...] = ()) -> list[Coverage]:
    """The coverage of results, in the order of their mechanisms and checks."""
    rows: dict[tuple[str, str], Coverage] = {}
    for result in results:
        key = result.mechanism, result.check
        row = rows.setdefault(key, Coverage(*key))
        row.compared += result.is_compared
        if result.status == UNSUPPORTED:
            row.unsupported[in_few_words(result.reason, backends)] += 1
        if result.status == SKIPPED:
            row.skipped[result.headline or "no reason given"] += 1
    return list(rows.values())
