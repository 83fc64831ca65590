"""What each level runs of the design's rows, and which part of its cases a run has.

    level    class as it is declared                its options, and compositions
    smoke    the first rows                         one or a few of the first rows, in turn
    full     all rows                               all rows
    stress   all rows, and rows drawn at random     the same

JAX, which compiles every operation for every shape, has a part of these. A run that names a
mechanism has all cases of its level. Others have a part (`PartOfCases`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from zlib import crc32

import precondattn as pa
from precondattn.spec.mesa_query import MesaQuery
from precondattn_conformance.case import Case
from precondattn_conformance.declared import derived, is_class, mechanism_of
from precondattn_conformance.design.covering import Row
from precondattn_conformance.design.factors import LONG, NONE
from precondattn_conformance.design.rows import Design, design
from precondattn_conformance.inputs import PLAIN
from precondattn_conformance.libraries import SHARING, named

LEVELS = ("smoke", "full", "stress")
NAMED = ("", "library", "only a mechanism", "mechanism")
"""What a run names, if anything: a library or backend, only mechanisms, or both."""
JAX_ROWS = 24
"""The number of rows for JAX, which compiles every operation for every shape."""
JAX_DENSE = 2
"""The number of rows without options for JAX at `smoke`."""
DRAWN = 48
"""The number of rows that are drawn at random at the level `stress`."""
WIDEST = 256
"""The width of keys at which a d × d matrix for each token takes seconds."""
PARTS = 12
"""The number of cases of options and compositions of which `full` runs one."""
ROWS = 3
"""The number of rows of options and compositions of which `smoke` runs one."""
OF_CLASSES = ("outputs", "gradients", "caching")
"""The checks that each library runs for a class on the plain layout; for others, the first."""


def require_possible(level: str, *filters: tuple[Sequence[str], Sequence[str], str]) -> None:
    """Raise a ValueError for another level, or for a name of a filter that is not possible."""
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}; found {level!r}")
    for names, possible, what in filters:
        for name in names:
            if name not in possible:
                raise ValueError(f"{name!r} is no {what}; there are {', '.join(possible)}")


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
        return _of_smoke(made) if library != "jax" else _of_smoke_of_jax(made) if is_one else []
    array = made.array
    chosen = array.rows
    if library == "jax":  # Rows without options, then the rows that cover the most new pairs.
        plain = [row for row in array.first if not _has_option(row)]
        chosen = (plain + array.pair_rows[len(array.first) :])[:JAX_ROWS]
    return chosen + array.drawn(DRAWN) if level == "stress" else chosen


def _of_smoke_of_jax(made: Design) -> list[Row]:
    """The densest rows, and rows with options and gradients, which have the same sizes."""
    dense = _of_smoke(made)
    of_options = [row for row in dense[JAX_DENSE:] if _has_option(row) and row["verb"] == "vjp"]
    return dense[:JAX_DENSE] + of_options


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

    def broadcasts_a_bias(row: Row) -> bool:
        return made.has_bias and row["bias"] in ("over b", "over h") and row["verb"] == "vjp"

    return [row for row in short if row is chosen or _has_option(row) or broadcasts_a_bias(row)]


@dataclass(frozen=True)
class PartOfCases:
    """The part of a level's cases that a run has, by what it names (one of `NAMED`).

    At `smoke`, the libraries of a run that names nothing share the cases. Each library has the
    outputs of every expression, and the gradients and caches of classes as they are declared, on
    one layout. Checks with threads are PyTorch's. Every other case, and every row of the design,
    is on one of the libraries, in turn; of options and compositions it is every third row. JAX has
    the outputs of classes. NumPy, PyTorch and CuPy run the same steps by the same algorithms, so
    most errors show on any of them.

    At `full`, a run that names no mechanism has all cases of classes as they are declared. Of
    options and compositions it has those of `smoke`, and every twelfth other one: the rows of a
    class have every option with every other level, and a composition calls the steps of classes.
    """

    level: str
    named: str
    dtypes: Mapping[str, Sequence[str]]
    """The dtypes of each library of the run."""
    applies: Callable[[Case], bool]
    """Whether the check of a case is meaningful for its mechanism and data."""

    def has_all_of(self, mechanism: str) -> bool:
        """Whether the run has all cases that are listed for a mechanism."""
        if self.level == "full":
            return self.named in NAMED[2:] or is_class(mechanism)
        return self.level != "smoke" or bool(self.named)

    def has(self, case: Case) -> bool:
        """Whether the run has this case of a mechanism of which it does not have all."""
        key = (case.check, case.dtype, case.layout.name, case.kind, case.mechanism)
        number = crc32("-".join(key).encode())
        if self.level == "full":
            return number % PARTS == 0
        if case.library not in SHARING:
            return is_class(case.mechanism) or not named(case.library).compiles_operations
        is_whole = is_class(case.mechanism)
        on_each = OF_CLASSES if is_whole else OF_CLASSES[:1]
        is_one = case.layout == PLAIN or (case.mechanism in derived() and not case.layout.block)
        if case.check == "threads" or (is_one and case.check in on_each):
            return True
        if case.layout.block and not is_whole and number % ROWS:
            return False
        if case.layout.d == WIDEST:
            # The reference may solve or multiply with a d × d matrix for every token.
            leaves = mechanism_of(case.mechanism).program.leaves
            if any(isinstance(leaf, MesaQuery | pa.ConditionedQuery) for leaf in leaves):
                return False
        able = [
            library
            for library in SHARING
            if case.dtype in self.dtypes.get(library, ())
            and self.applies(replace(case, library=library))
        ]
        return able[number % len(able)] == case.library
