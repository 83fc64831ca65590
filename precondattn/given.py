"""Types for the arguments of a caller before they are checked, and the check of whole numbers."""

from __future__ import annotations

import operator
from typing import Any

Given = Any

Arguments = dict[str, Any]


def whole_number(value: Given) -> int | None:
    """An integer of any type as Python's; None for booleans and for anything else."""
    # A symbolic size of PyTorch stays symbolic.
    if type(value) is int or type(value).__name__ == "SymInt":
        number: int = value
        return number
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def at_least(lowest: int, name: str, value: Given) -> int:
    """A whole number as Python's; a ValueError names the argument that is none, or too low."""
    number = whole_number(value)
    if number is None or number < lowest:
        shape = getattr(value, "shape", None)
        found = f"an array of shape {tuple(shape)}" if shape else repr(value)
        raise ValueError(f"{name} must be a whole number, {lowest} or above; found {found}")
    return number
