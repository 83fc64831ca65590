"""Cells of results and families of mechanisms, for the matrix and the page.

A family is a mechanism with its variants, or a preconditioner with all its compositions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from precondattn_conformance.report.result import Result, error_text, share_text, worst
from precondattn_conformance.status import FAILED, PASSED, SKIPPED, STATUSES, UNSUPPORTED, XFAILED

Key = TypeVar("Key", bound=Hashable)

SYMBOLS = {FAILED: "✗", XFAILED: "x", UNSUPPORTED: "○", SKIPPED: "·"}
WORDS = {
    PASSED: "passed",
    FAILED: "failed",
    XFAILED: "failed as expected",
    UNSUPPORTED: "unsupported",
    SKIPPED: "skipped",
}
LEADING = (FAILED, PASSED, XFAILED, UNSUPPORTED, SKIPPED)
"""The statuses by priority: a cell has the first of these that one of its results has."""


class Cell:
    """The results of one cell."""

    def __init__(self, results: Iterable[Result] = ()) -> None:
        self.results = list(results)
        self.counts = Counter(result.status for result in self.results)

    @property
    def status(self) -> str:
        """The first of `LEADING` that occurs; empty if there are no results."""
        return next((status for status in LEADING if self.counts[status]), "")

    @property
    def worst(self) -> Result | None:
        """The result with the largest error / bound, among those that decide the status."""
        return worst(result for result in self.results if result.status == self.status)

    @property
    def share(self) -> str:
        """The largest error / bound in a few characters; empty if nothing was measured."""
        result = self.worst
        return "" if result is None or result.share is None else share_text(result.share)

    @property
    def text(self) -> str:
        """The cell's text: `12%`, `12% ○3`, `✗2 41x`, `x1`, `○9`, `·4`; `ok` without an error."""
        if not self.results:
            return ""
        if self.status == PASSED:
            beside = [s for s in (XFAILED, UNSUPPORTED) if self.counts[s]]
            return " ".join(
                [self.share or "ok", *(f"{SYMBOLS[s]}{self.counts[s]}" for s in beside)]
            )
        count = f"{SYMBOLS[self.status]}{self.counts[self.status]}"
        return f"{count} {self.share}" if self.status == FAILED and self.share else count

    @property
    def brief(self) -> str:
        """The cell's text in at most about four characters: `12%`, `12%○`, `✗2`."""
        if self.status == PASSED:
            beside = next((SYMBOLS[s] for s in (XFAILED, UNSUPPORTED) if self.counts[s]), "")
            return f"{self.share or 'ok'}{beside}"
        return f"{SYMBOLS[self.status]}{self.counts[self.status]}" if self.results else ""

    @property
    def in_words(self) -> str:
        """The cell in words: `3 passed, 1 unsupported; worst error 3.2e-06 of 2e-05 …`."""
        counts = [f"{self.counts[s]} {WORDS[s]}" for s in STATUSES if self.counts[s]]
        result = self.worst
        measured = "" if result is None else error_text(result)
        return ", ".join(counts) + (f"; worst {measured}" if measured else "")


def grouped_by(results: Iterable[Result], key: Callable[[Result], Key]) -> dict[Key, list[Result]]:
    """Results in groups, in the order of the first result of each group."""
    groups: dict[Key, list[Result]] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result)
    return groups


def family(mechanism: str) -> str:
    """The name at the beginning of an expression."""
    match = re.match(r"\w+", mechanism)
    return match[0] if match else mechanism


def by_family(results: Iterable[Result]) -> dict[str, dict[str, list[Result]]]:
    """Results by family, and within a family by mechanism."""
    groups = grouped_by(results, lambda result: family(result.mechanism))
    return {
        name: grouped_by(group, lambda result: result.mechanism) for name, group in groups.items()
    }


def in_order(names: Iterable[str]) -> list[str]:
    """Each name once, in the order of first occurrence."""
    return list(dict.fromkeys(names))
