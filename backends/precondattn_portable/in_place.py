"""Results that go to a part of an array, computed there where the library can."""

from __future__ import annotations

from typing import Any

from precondattn.arrays import Array
from precondattn_portable.arithmetic import Arithmetic


def product_at(ops: Arithmetic, array: Array, where: Any, a: Array, b: Array) -> Array:
    """array[where] = a b, and what is there then."""
    view = array[where]
    return _stored(array, where, view, ops.product(a, b, view))


def add_at(ops: Arithmetic, array: Array, where: Any, x: Array) -> Array:
    """array[where] += x, and what is there then.

    Written so, libraries that add in place would yet copy the sum from where it is to where it is.
    """
    view = array[where]
    return _stored(array, where, view, ops.add(view, x))


def subtract_at(ops: Arithmetic, array: Array, where: Any, x: Array | float) -> Array:
    """array[where] −= x, and what is there then."""
    view = array[where]
    return _stored(array, where, view, ops.subtract(view, x))


def add_kept_at(
    ops: Arithmetic, array: Array, where: Any, state: Array, total: Array | None
) -> Array:
    """array[where] += total ∘ state, and what is there then; all of the state without `total`."""
    if total is None:
        return add_at(ops, array, where, state)
    view = array[where]
    return _stored(array, where, view, ops.add_multiple(view, state, total))


def _stored(array: Array, where: Any, view: Array, result: Array) -> Array:
    if result is not view:
        array[where] = result
    return result
