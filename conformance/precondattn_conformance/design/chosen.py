"""The rows of the design that a level runs."""

from __future__ import annotations

from zlib import crc32

from precondattn_conformance.design.covering import Row
from precondattn_conformance.design.factors import LONG, NONE
from precondattn_conformance.design.rows import Design, design

JAX_ROWS = 24
"""The number of rows for JAX, which compiles every operation for every shape."""
JAX_DENSE = 2
"""The number of rows without options for JAX at `smoke`."""
DRAWN = 48
"""The number of rows that are drawn at random at the level `stress`."""


def rows(
    level: str,
    mechanism: str,
    library: str,
    blocks: tuple[int, ...] = (),
    *,
    is_one: bool = False,
) -> list[Row]:
    """The rows of a mechanism on a library. `is_one`: the run names the mechanism."""
    if library == "array_api_strict":
        return []  # It only shows which functions are used; named layouts suffice for that.
    made = design(mechanism, library, blocks)
    if level == "smoke":
        if library != "jax":
            return _of_smoke(made)
        return _of_smoke_of_jax(made) if is_one else []
    chosen = _of_jax(made) if library == "jax" else list(made.rows)
    return chosen + made.drawn(DRAWN) if level == "stress" else chosen


def _of_jax(made: Design) -> list[Row]:
    """The first rows without options, then the rows that cover the most new pairs."""
    first = made.array.first
    plain = [row for row in first if row.get("option", NONE) == NONE]
    return (plain + made.array.pairs[len(first) :])[:JAX_ROWS]


def _of_smoke_of_jax(made: Design) -> list[Row]:
    """The densest rows, and rows with options and gradients, which have the same sizes."""
    first = _of_smoke(made)
    options = [r for r in first if r.get("option", NONE) != NONE and r["verb"] == "vjp"]
    return [*first[:JAX_DENSE], *(row for row in options if row not in first[:JAX_DENSE])]


def _of_smoke(made: Design) -> list[Row]:
    """All first rows for a class as it is declared; for other expressions one short row, in turn.

    Expressions with a bias also have the rows that broadcast it along one axis. Expressions with an
    inner eps also have the row with another eps.
    """
    first = made.array.first
    if made.is_whole or not first:
        return first
    short = [row for row in first if row["time"] not in LONG]
    chosen = short[crc32(made.expression.encode()) % len(short)]
    return [
        row
        for row in short
        if row is chosen
        or row.get("option", NONE) != NONE
        or (made.traits.has_bias and row["bias"] in ("over b", "over h") and row["verb"] == "vjp")
    ]
