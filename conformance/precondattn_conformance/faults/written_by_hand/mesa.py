"""Faults of Mesa's query, of its definition and of its iteration."""

from __future__ import annotations

from typing import Any

from precondattn.spec.mesa_query import MesaQuery
from precondattn_conformance.faults.fault import BACKWARD, FORWARD, STEP, Fault, inside
from precondattn_conformance.faults.written_by_hand.written import blocked, written
from precondattn_portable import mesa_query as iterated

BOTH = (FORWARD, BACKWARD)
QUERY = "mesa_query"
DECAYED = "mesa_query[decay=head,beta=true]"


def faults() -> list[Fault]:
    """All faults in this file."""
    return [
        written(
            DECAYED,
            (FORWARD, STEP),
            "keys weighted by β²",
            inside(MesaQuery, "_beta", lambda true: lambda self, x, m: true(self, x, m) ** 2),
        ),
        written(
            QUERY,
            (FORWARD, STEP),
            "half of λ",
            inside(MesaQuery, "_ridge", lambda true: lambda self, x, m: 0.5 * true(self, x, m)),
        ),
        blocked(
            QUERY,
            BOTH,
            "two digits of the solution",
            iterated,
            "tolerance_of",
            lambda _: lambda leaf, x: 1e-2,
        ),
        blocked(
            QUERY,
            BOTH,
            "the residual not examined",
            iterated,
            "Residual",
            lambda true: _NeverLarge,
        ),
    ]


class _NeverLarge(iterated.Residual):
    def is_large(self) -> Any:
        return self.length < 0
