"""The rows of the design that a level runs."""

from __future__ import annotations

from zlib import crc32

from precondattn_conformance.design.covering import Row
from precondattn_conformance.design.factors import LONG, NONE
from precondattn_conformance.design.rows import Design, design

JAX_ROWS = 24
"""JAX compiles every operation for every shape, so it gets a few rows only."""
JAX_DENSE = 2
"""The rows without options that it gets at `smoke`."""
DRAWN = 48
"""The rows that are drawn at the level `stress`."""


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
        return []  # It shows which functions are used, for which the named layouts are enough.
    made = design(mechanism, library, blocks)
    if level == "smoke":
        if library != "jax":
            return _of_smoke(made)
        return _of_smoke_of_jax(made) if is_one else []
    chosen = _of_jax(made) if library == "jax" else list(made.rows)
    return chosen + made.drawn(DRAWN) if level == "stress" else chosen


def _of_jax(made: Design) -> list[Row]:
    """The first rows without options, and those after them, which have the most new pairs."""
    first = made.array.first
    plain = [row for row in first if row.get("option", NONE) == NONE]
    return (plain + made.array.pairs[len(first) :])[:JAX_ROWS]


def _of_smoke_of_jax(made: Design) -> list[Row]:
    """The densest rows, and the gradients of options, which have the same sizes."""
    first = _of_smoke(made)
    options = [r for r in first if r.get("option", NONE) != NONE and r["verb"] == "vjp"]
    return [*first[:JAX_DENSE], *(row for row in options if row not in first[:JAX_DENSE])]


def _of_smoke(made: Design) -> list[Row]:
    """All first rows of a class as it is declared; of other expressions one short row, in turn.

    Those with a bias also have the rows that broadcast it along one axis, and those with an inner
    eps the row with another.
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
