"""What each level runs of the design's rows.

    level    class as it is declared                its options, and compositions
    smoke    the first rows                         one or a few of the first rows, in turn
    full     all rows                               all rows
    stress   all rows, and rows drawn at random     the same

JAX, which compiles every operation for every shape, has a part of these.
"""

from __future__ import annotations

from zlib import crc32

from precondattn_conformance.design.covering import Row
from precondattn_conformance.design.factors import LONG, NONE
from precondattn_conformance.design.rows import Design, design

LEVELS = ("smoke", "full", "stress")
NAMED = ("", "library", "only a mechanism", "mechanism")
"""What a run names, if anything: a library or backend, only mechanisms, or both."""
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
    is_strict = library == "array_api_strict"  # It only shows which functions are used.
    if is_strict or (level == "smoke" and library == "jax" and not is_one):
        return []
    made = design(mechanism, library, blocks)
    if level == "smoke":
        dense = _of_smoke(made)
        if library != "jax":
            return dense
        # The densest rows, and rows with options and gradients, which have the same sizes.
        of_options = [row for row in dense[JAX_DENSE:] if _has_option(row)]
        return dense[:JAX_DENSE] + [row for row in of_options if row["verb"] == "vjp"]
    array = made.array
    chosen = array.rows
    if library == "jax":  # Rows without options, then the rows that cover the most new pairs.
        plain = [row for row in array.first if not _has_option(row)]
        chosen = (plain + array.pair_rows[len(array.first) :])[:JAX_ROWS]
    return chosen + array.drawn(DRAWN) if level == "stress" else chosen


def _has_option(row: Row) -> bool:
    return row.get("option", NONE) != NONE


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
    biased = [row for row in short if row.get("bias") in ("over b", "over h")]
    with_gradients = [row for row in biased if row["verb"] == "vjp"]
    return [row for row in short if row in (chosen, *with_gradients) or _has_option(row)]
