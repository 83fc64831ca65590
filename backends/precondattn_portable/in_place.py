"""Results that go to a part of an array, computed there where the library can."""

from __future__ import annotations

from typing import Any

from precondattn.arrays import Array
from precondattn_portable.arithmetic import Arithmetic


def product_at(ops: Arithmetic, array: Array, where: Any, a: Array, b: Array) -> Array:
    """array[where] = a b, and what is there then."""
    place = array[where]
    return _placed(array, where, place, ops.product(a, b, place))


def add_at(ops: Arithmetic, array: Array, where: Any, x: Array) -> Array:
    """array[where] += x, and what is there then.

    Written so, libraries that add in place would yet copy the sum from where it is to where it is.
    """
    place = array[where]
    return _placed(array, where, place, ops.add(place, x))


def subtract_at(ops: Arithmetic, array: Array, where: Any, x: Array | float) -> Array:
    """array[where] −= x, and what is there then."""
    place = array[where]
    return _placed(array, where, place, ops.subtract(place, x))


def add_kept_at(
    ops: Arithmetic, array: Array, where: Any, state: Array, total: Array | None
) -> Array:
    """array[where] += total ∘ state, and what is there then; all of the state without `total`."""
    if total is None:
        return add_at(ops, array, where, state)
    place = array[where]
    return _placed(array, where, place, ops.add_multiple(place, state, total))


def _placed(array: Array, where: Any, place: Array, found: Array) -> Array:
    if found is not place:
        array[where] = found
    return found
