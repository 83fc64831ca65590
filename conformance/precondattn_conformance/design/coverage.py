"""Coverage of a run: how many compatible pairs of levels it compared, by mechanism and in all.

A pair is covered if a case with both levels was compared with the oracle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from precondattn.json_types import JsonObject
from precondattn_conformance.case import Case
from precondattn_conformance.design.chosen import rows
from precondattn_conformance.design.covering import Level, pairs_of
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
    found = []
    for mechanism in mechanisms:
        looked_at: set[tuple[str, tuple[Level, Level]]] = set()
        total = 0
        for library in libraries:
            made = design(mechanism, library, blocks)
            total += len(made.pairs)
            for row in rows(level, mechanism, library, blocks):
                # This row ran in float32 if the backend lacks float64.
                in_float32 = {**row, "dtype": "float32"}
                for compared_row in (row,) if row == in_float32 else (row, in_float32):
                    check, layout, kind, dtype, expression = made.entry(compared_row)
                    if Case(check, expression, library, dtype, layout, kind).id in compared:
                        seen = made.pairs.intersection(pairs_of(compared_row))
                        looked_at |= {(library, pair) for pair in seen}
        found.append(Pairs(mechanism, len(looked_at), total))
    return found


def total(rows: Iterable[Pairs]) -> Pairs:
    rows = list(rows)
    return Pairs(
        "all mechanisms", sum(row.looked_at for row in rows), sum(row.total for row in rows)
    )
