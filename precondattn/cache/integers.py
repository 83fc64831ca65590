"""Integer arguments of cache operations: lengths (b,) and indices (b',)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from precondattn.arrays import (
    Array,
    cast,
    dtype_name,
    exact_device,
    fresh,
    is_traced,
    library_of,
    namespace,
    placement,
)
from precondattn.given import Given, whole_number


class Integers(NamedTuple):
    """Integers as an array of the cache's library."""

    array: Array
    known: list[int] | None
    """The integers as a list; None if they are traced."""


def integers(name: str, given: Given, like: Array, count: int | None = None) -> Integers:
    """The integers of a list, or of an array of the library of `like`; `count` of them if given."""
    xp = namespace(like)
    known: list[int] | None
    if isinstance(given, (list, tuple, range)):
        known = whole_numbers(name, given)
        array = xp.asarray(known, dtype=xp.int32, **placement(like))
    else:
        array = _checked(name, given, like)
        known = None if is_traced(array) else entries(array)
        array = cast(array, xp.int32)
        array = fresh(array) if array is given else array
    if count is not None and array.shape[0] != count:
        raise ValueError(
            f"{name} must be {count} integers, one for each sequence; found {array.shape[0]}"
        )
    return Integers(array, known)


def entries(array: Array) -> list[int]:
    """The entries of an array (n,) of integers or booleans that is not traced."""
    if hasattr(array, "tolist"):
        return [int(n) for n in array.tolist()]
    return [int(array[i]) for i in range(array.shape[0])]


def whole_numbers(name: str, given: Sequence[Given]) -> list[int]:
    """Integers of any type as Python integers. Booleans and floats such as 1.0 are refused."""
    numbers = [number for number in map(whole_number, given) if number is not None]
    if len(numbers) < len(given):
        raise TypeError(f"{name} must be whole numbers; found {given!r}")
    return numbers


def _checked(name: str, array: Array, like: Array) -> Array:
    library = library_of(like)
    if library_of(array) != library:
        raise TypeError(
            f"{name} must be a list of integers or an array of {library}, as the cache is; "
            f"found {type(array).__name__}"
        )
    dtype = dtype_name(array)
    if array.ndim != 1 or not dtype.startswith(("int", "uint")):
        raise TypeError(
            f"{name} must be integers with one axis; found {dtype} of shape {tuple(array.shape)}"
        )
    device, expected = exact_device(array), exact_device(like)
    if None not in (device, expected) and device != expected:
        raise ValueError(f"{name} is on {device}; the cache is on {expected}")
    return array
