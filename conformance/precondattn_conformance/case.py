"""Cases: what is checked, on which library, dtype and data. Ids are stable and replay a case.

gradients-torch-float32-block_and_one-clustered-lucid(path)
check     library dtype layout        keys      mechanism
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import precondattn as pa
from precondattn_conformance import libraries
from precondattn_conformance.checks import CHECK, CHECKS
from precondattn_conformance.declared import expressions, is_bounded, mechanism_of
from precondattn_conformance.extremes import EXTREMES
from precondattn_conformance.grid import LAYOUTS, LEVELS, data
from precondattn_conformance.inputs import KINDS, Layout
from precondattn_conformance.random_layouts import layout_named

__all__ = ["CHECKS", "LEVELS", "Case", "case_of", "cases"]


HARMFUL = ("duplicate", "real", *EXTREMES)
"""Data for mechanisms whose result obeys a bound."""


@dataclass(frozen=True)
class Case:
    """One check of one mechanism on one kind of data."""

    check: str
    mechanism: str
    library: str
    dtype: str
    layout: Layout
    kind: str

    @property
    def id(self) -> str:
        parts = (self.check, self.library, self.dtype, self.layout.name, self.kind, self.mechanism)
        return "-".join(parts)


def cases(
    level: str = "smoke",
    *,
    only_libraries: tuple[str, ...] = (),
    only_mechanisms: tuple[str, ...] = (),
    only_checks: tuple[str, ...] = (),
    only_dtypes: tuple[str, ...] = (),
) -> Iterator[Case]:
    """The cases of a level, on every installed library unless told otherwise.

    A mechanism that was asked for need not be declared; any expression will do. All of one
    mechanism's cases follow each other, since they share what the oracle says.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}; found {level!r}")
    for wanted, known, what in (
        (only_checks, CHECKS, "check"),
        (only_libraries, tuple(libraries.installed()), "installed array library"),
        (only_dtypes, libraries.WIDE + libraries.HALF, "dtype"),
    ):
        for each in wanted:
            if each not in known:
                raise ValueError(f"{each!r} is no {what}; there are {', '.join(known)}")
    names = tuple(str(pa.parse(text)) for text in only_mechanisms) or tuple(expressions())
    chosen = only_libraries or tuple(libraries.installed())
    return _cases(level, names, chosen, only_checks or CHECKS, only_dtypes)


def known_cases() -> Iterator[Case]:
    """Every case, also of libraries that are not installed here: the last level has all others'."""
    everywhere = tuple(cls.name for cls in libraries.ALL)
    return _cases(LEVELS[-1], tuple(expressions()), everywhere, CHECKS, ())


def _cases(
    level: str,
    names: tuple[str, ...],
    chosen: tuple[str, ...],
    checks: tuple[str, ...],
    only_dtypes: tuple[str, ...],
) -> Iterator[Case]:
    dtypes = {name: libraries.named(name).dtypes for name in chosen}
    is_alone = len(chosen) == 1
    for name in names:
        for dtype in libraries.WIDE + libraries.HALF:
            if only_dtypes and dtype not in only_dtypes:
                continue
            for library in chosen:
                if dtype not in dtypes[library]:
                    continue
                for check in checks:
                    for layout, kind in data(level, check, library, dtype, name, is_alone):
                        case = Case(check, name, library, dtype, layout, kind)
                        if makes_sense(case):
                            yield case


def case_of(text: str) -> Case:
    """The case of an id.

    Raises
    ------
    ValueError
        for what is no id, with the part that is wrong.
    """
    parts = text.strip().split("-", 5)
    if len(parts) != 6:
        raise ValueError(f"{text!r} is no case; an id is check-library-dtype-layout-keys-mechanism")
    check, library, dtype, layout, kind, mechanism = parts
    for part, known, what in (
        (check, CHECKS, "check"),
        (library, tuple(libraries.installed()), "installed array library"),
        (dtype, libraries.WIDE + libraries.HALF, "dtype"),
        (kind, KINDS + EXTREMES, "kind of keys"),
    ):
        if part not in known:
            raise ValueError(f"{text!r}: {part!r} is no {what}; there are {', '.join(known)}")
    sizes = LAYOUTS.get(layout) or layout_named(layout)
    if sizes is None:
        raise ValueError(f"{text!r}: {layout!r} is no layout; there are {', '.join(LAYOUTS)}")
    return Case(check, str(pa.parse(mechanism)), library, dtype, sizes, kind)


def makes_sense(case: Case) -> bool:
    """Whether a mechanism has an answer for this data that could be compared."""
    return _makes_sense(case.check, case.mechanism, case.library, case.layout, case.kind)


@cache
def _makes_sense(check: str, expression: str, library: str, layout: Layout, kind: str) -> bool:
    """It depends on no dtype."""
    if kind in HARMFUL and not is_bounded(mechanism_of(expression)):
        return False
    if layout.mask is not None and layout.t != layout.s:
        if not _has_keys(expression):
            return False  # Its mask is about queries.
        if layout.mask != "key_mask" and not mechanism_of(expression).offers.causal:
            return False  # Where its queries stand is not said.
    return CHECK[check].applies(Case(check, expression, library, "float64", layout, kind))


def _has_keys(expression: str) -> bool:
    patterns = mechanism_of(expression).inputs.values()
    return any(axis.letter == "s" for pattern in patterns for axis in pattern.axes)
