"""The cases that a mutant runs, and their order: the most sensitive cases come first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from precondattn_conformance.case import Case
from precondattn_conformance.mutation.mutant import Mutant
from precondattn_conformance.mutation.trial import Baseline

LIMIT = 10.0
"""A mutant's time limit: this factor times the unchanged code's time, plus this many seconds."""


class CaseOrder:
    """The cases that pass on the unchanged code, and the mutants that each has killed."""

    def __init__(self, baselines: Iterable[Baseline], most: int | None = None) -> None:
        """`most` is the largest number of cases for a mutant."""
        self.most = most
        # Cases of different checks, mechanisms and data come first; among these the shortest.
        shortest = sorted(baselines, key=lambda b: b.seconds)
        seen: Counter[tuple[str, ...]] = Counter()
        ranked = []
        for each in shortest:
            case = each.case
            groups = ((case.check,), (case.mechanism,), (case.layout.name, case.kind))
            ranked.append((sum(seen[group] for group in groups), each))
            seen.update(groups)
        self.baselines = [each for _, each in sorted(ranked, key=lambda pair: pair[0])]
        self.kills: Counter[str] = Counter()
        self.kills_in: Counter[tuple[str, str, str]] = Counter()

    def cases(self, mutant: Mutant) -> list[tuple[Case, float]]:
        """The cases that execute the changed lines, each with its time limit in seconds."""
        first, last = mutant.lines
        wanted = [(mutant.target, line) for line in range(first, last + 1)]
        found = [b for b in self.baselines if not b.lines.isdisjoint(wanted)]
        found.sort(
            key=lambda b: (
                -self.kills_in[mutant.target, mutant.function, b.case.id],
                -self.kills[b.case.id],
            )
        )
        return [(b.case, LIMIT * b.seconds + LIMIT) for b in found[: self.most]]

    def killed(self, mutant: Mutant, case: str) -> None:
        """Record that a case has killed a mutant, which moves the case forward."""
        self.kills[case] += 1
        self.kills_in[mutant.target, mutant.function, case] += 1
