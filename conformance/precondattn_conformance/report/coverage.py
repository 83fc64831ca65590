"""What was compared and what was not, by mechanism and check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from precondattn_conformance.report.refusal import in_few_words
from precondattn_conformance.report.result import Result
from precondattn_conformance.status import SKIPPED, UNSUPPORTED


@dataclass
class Coverage:
    """How many cases of one mechanism and check were compared; of the others, why not."""

    mechanism: str
    check: str
    compared: int = 0
    unsupported: Counter[str] = field(default_factory=Counter)
    """By the backend's reason."""
    skipped: Counter[str] = field(default_factory=Counter)
    """By the reason."""

    @property
    def total(self) -> int:
        return self.compared + self.unsupported.total() + self.skipped.total()

    def to_json(self) -> dict[str, Any]:
        """What is not empty."""
        whole = {"unsupported": dict(self.unsupported), "skipped": dict(self.skipped)}
        own = {"mechanism": self.mechanism, "check": self.check, "compared": self.compared}
        return {**own, **{name: reasons for name, reasons in whole.items() if reasons}}


def coverage(results: Iterable[Result], backends: tuple[str, ...] = ()) -> list[Coverage]:
    """In the order in which mechanisms and checks were met."""
    found: dict[tuple[str, str], Coverage] = {}
    for result in results:
        key = result.mechanism, result.check
        row = found.setdefault(key, Coverage(*key))
        row.compared += result.is_compared
        if result.status == UNSUPPORTED:
            row.unsupported[in_few_words(result.reason, backends)] += 1
        if result.status == SKIPPED:
            row.skipped[result.headline or "no reason given"] += 1
    return list(found.values())
