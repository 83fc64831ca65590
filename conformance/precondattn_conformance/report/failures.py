"""The failing cases of a run: those shown in full, those only listed, and the kinds of failures."""

from __future__ import annotations

import re
from itertools import chain, zip_longest

from precondattn_conformance.report.cells import grouped_by
from precondattn_conformance.report.result import Result, share_text
from precondattn_conformance.status import FAILED

IN_FULL = 150
"""The number of failures that are shown in full. The record contains all of them."""

LISTED = 2000
"""The number of further failures that are listed by id."""

KINDS = 12
"""The number of listed kinds of failures. Reasons that differ only in numbers are one kind."""

NUMBER = re.compile(r"(?<![\w])-?\d[\d.]*(?:e[+-]?\d+)?")

LONGEST = 300


def in_one_line(result: Result, *, share: bool = True) -> str:
    """The reason for a failure and its size, in one line."""
    text = result.headline or "no reason was given"
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    factor = "" if result.share is None or not share else share_text(result.share)
    return f"{text} ({factor} its bound)" if factor.endswith("x") else text


class Failures:
    """The failing cases: those shown in full, and the ids of the others.

    If there are too many, the first case of every mechanism and check is shown, then the second,
    and so on.
    """

    def __init__(self, results: list[Result]) -> None:
        groups = grouped_by(results, lambda result: (result.mechanism, result.check)).values()
        turns = chain.from_iterable(zip_longest(*groups))
        in_turn = [result for result in turns if result is not None]
        shown = {result.id for result in in_turn[:IN_FULL]}
        self.total = len(results)
        self.in_full = [result for result in results if result.id in shown]
        others = [result for result in results if result.id not in shown]
        self.listed, self.left_out = others[:LISTED], max(len(others) - LISTED, 0)
        self.number = {result.id: i for i, result in enumerate(self.in_full)}
        alike = grouped_by(
            results, lambda result: NUMBER.sub("...", in_one_line(result, share=False))
        )
        kinds = sorted(alike.items(), key=lambda kind: -len(kind[1]))
        self.kinds = [(text, len(group), self.link(group)) for text, group in kinds[:KINDS]]
        self.more_kinds = len(kinds) - len(self.kinds)

    def link(self, results: list[Result]) -> str:
        """A link to the first of these results that is shown in full."""
        for result in results:
            if result.id in self.number:
                return f"#failure-{self.number[result.id]}"
        return "#failures" if any(result.status == FAILED for result in results) else ""
