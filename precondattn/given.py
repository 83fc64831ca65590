"""Types for the arguments of a caller before they are checked, and the check of whole numbers."""

from __future__ import annotations

import operator
from typing import Any

Given = Any
"""An argument: an array, a list, a number, or something invalid."""

Arguments = dict[str, Any]
"""Arguments by name."""


def whole_number(given: Given) -> int | None:
    """An integer of any type as Python's; None for booleans and for anything else."""
    # A symbolic size of PyTorch stays symbolic.
    if type(given) is int or type(given).__name__ == "SymInt":
        number: int = given
        return number
    if isinstance(given, bool) or "bool" in str(getattr(given, "dtype", "")):
        return None
    try:
        return operator.index(given)
    except TypeError:
        return None


def at_least(lowest: int, name: str, given: Given) -> int:
    """A whole number as Python's; a ValueError names the argument that is none, or too low."""
    number = whole_number(given)
    if number is None or number < lowest:
        shape = getattr(given, "shape", None)
        found = f"an array of shape {tuple(shape)}" if shape else repr(given)
        raise ValueError(f"{name} must be a whole number, {lowest} or above; found {found}")
    return number
