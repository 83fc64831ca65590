"""Updates of a part of an array, computed in place where the library can."""

from __future__ import annotations

from collections.abc import Callable

from precondattn.arrays import Array, Index
from precondattn_portable.arithmetic import Arithmetic


def product_at(ops: Arithmetic, array: Array, where: Index, a: Array, b: Array) -> Array:
    """array[where] = a b; returns the new part."""
    view = array[where]
    return stored(array, where, view, ops.product(a, b, view))


def add_at(ops: Arithmetic, array: Array, where: Index, x: Array) -> Array:
    """array[where] += x, without a copy of the sum onto itself; returns the new part."""
    view = array[where]
    return stored(array, where, view, ops.add(view, x))


def changed_at(
    operation: Callable[..., Array], array: Array, where: Index, *given: Array | float
) -> Array:
    """array[where] = operation(array[where], …); returns the new part."""
    view = array[where]
    return stored(array, where, view, operation(view, *given))


def stored(array: Array, where: Index, view: Array, result: Array) -> Array:
    """array[where] = result, where it is not in `view`, which is array[where], already."""
    if result is not view:
        array[where] = result
    return result
