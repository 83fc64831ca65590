"""Coverage of a run: how many compatible pairs of levels it compared, by mechanism and in all.

A pair is covered if a case with both levels was compared with the oracle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from precondattn.json_types import JsonObject
from precondattn_conformance.design.covering import Level, pairs_of
from precondattn_conformance.design.levels import rows
from precondattn_conformance.design.rows import design


class Pairs(NamedTuple):
    """The pairs of levels of one mechanism, on all libraries of a run."""

    mechanism: str
    looked_at: int
    total: int

    @property
    def share(self) -> float:
        return self.looked_at / max(self.total, 1)

    def to_json(self) -> JsonObject:
        return self._asdict()


def pairs(
    level: str,
    mechanisms: Iterable[str],
    libraries: Sequence[str],
    compared: set[str],
    blocks: tuple[int, ...],
) -> list[Pairs]:
    """The pair counts of each of these mechanisms, in their order.

    `compared` are the ids of the cases that were compared. A mechanism's rows with options count
    for the mechanism, and not for the variant that they call.
    """
    counts = []
    for mechanism in mechanisms:
        looked_at = total = 0
        for library in libraries:
            made = design(mechanism, library, blocks)
            possible = made.array.pairs
            total += len(possible)
            seen: set[tuple[Level, Level]] = set()
            for row in rows(level, mechanism, library, blocks):
                # The row ran in float32 if the backend lacks float64.
                for ran in (row, {**row, "dtype": "float32"}):
                    if made.case(ran).id in compared:
                        seen |= possible.intersection(pairs_of(ran))
            looked_at += len(seen)
        counts.append(Pairs(mechanism, looked_at, total))
    return counts


def total(counts: Sequence[Pairs]) -> Pairs:
    looked_at = sum(count.looked_at for count in counts)
    return Pairs("all mechanisms", looked_at, sum(count.total for count in counts))
