"""What to write instead of a composition that is refused: one that has been constructed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Mechanism, Preconditioner
    from precondattn.algebra.options import OptionValue

SEARCHED = 4
"""Preconditioners around a base, up to which another place for a refused one is looked for."""


def moved_inside(outer: Preconditioner, base: Mechanism) -> Preconditioner | None:
    """The outer preconditioner inside those of the base, as little as possible.

    None where it is accepted in no such place.
    """
    if not 0 < base._depth <= SEARCHED:  # It is 0 where the base is no preconditioner.
        return None
    around = cast("Preconditioner", base)
    inner = with_base(outer, around.base) or moved_inside(outer, around.base)
    return None if inner is None else with_base(around, inner)


def with_base(
    outer: Preconditioner, base: Mechanism, **options: OptionValue
) -> Preconditioner | None:
    """A preconditioner around another base, with some other options; None where it is refused."""
    # Its constructor would look for advice too.
    unchecked = object.__new__(type(outer))
    for field in dataclasses.fields(outer):
        object.__setattr__(unchecked, field.name, getattr(outer, field.name))
    for name, value in {**options, "base": base}.items():
        object.__setattr__(unchecked, name, value)
    if unchecked.refuses() is not None:
        return None
    try:
        return dataclasses.replace(outer, base=base, **options)
    except (TypeError, ValueError):  # Names of inputs clash.
        return None
