"""The rows of the design that a level runs."""

from __future__ import annotations

from precondattn_conformance.declared import derived
from precondattn_conformance.design.covering import Row
from precondattn_conformance.design.rows import Design, design

SMOKE_ROWS = 10
"""Of a class as it is declared; of its variants and of compositions there are fewer."""
SMOKE_ROWS_OF_OTHERS = 1
JAX_ROWS = 24
"""JAX compiles every operation for every shape, so it gets the first rows only."""
DRAWN = 48
"""The rows that are drawn at the level `stress`."""


def rows(level: str, mechanism: str, library: str, blocks: tuple[int, ...] = ()) -> list[Row]:
    """The rows of a mechanism on a library."""
    if library == "array_api_strict":
        return []  # It shows which functions are used, for which the named layouts are enough.
    made = design(mechanism, library, blocks)
    if level == "smoke":
        return _of_smoke(made, library)
    chosen = made.rows[:JAX_ROWS] if library == "jax" else list(made.rows)
    return chosen + made.drawn(DRAWN) if level == "stress" else chosen


def _of_smoke(made: Design, library: str) -> list[Row]:
    if library == "jax":
        return []
    count = SMOKE_ROWS if made.is_whole else SMOKE_ROWS_OF_OTHERS
    if made.expression in derived():
        count = SMOKE_ROWS_OF_OTHERS
    return [row for row in made.array.pairs if _is_cheap(made, row)][:count]


def _is_cheap(made: Design, row: Row) -> bool:
    """Whether the oracle takes a few milliseconds."""
    layout = made.entry(row).layout
    heads = layout.b * layout.h * layout.values_per_head
    if layout.s > LONGEST:
        return False
    per_query = layout.s * (layout.d + layout.e) + layout.d * layout.e
    return heads * layout.t * per_query < MOST


LONGEST = 400
"""The most keys in a row of `smoke`."""
MOST = 2e7
"""Multiplications of a dense score matrix and its product with values, in a row of `smoke`."""
