"""Orders in memory of a call's arrays.

===================  =========================================================================
heads_first          the head axis before the token axis
every_other_element  every other element of a larger array, with NaN between
window               a window of a larger array, with NaN around it
expanded_batch       k and other inputs of a key except v, stored once for all sequences
expanded_heads       the same inputs, stored once for all heads
expanded_tokens      gates, β, … and the cotangent, stored once for all sequences and tokens
===================  =========================================================================

The cotangent has the order of the inputs. Expanded axes have stride 0. JAX has no views; there the
arrays only have equal entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from precondattn.arrays import Array, Arrays, namespace

if TYPE_CHECKING:
    import precondattn as pa
    from precondattn_conformance.libraries import Library

VIEWS = ("heads_first", "every_other_element", "window")
EXPANDED = ("expanded_batch", "expanded_heads", "expanded_tokens")
ORDERS = VIEWS + EXPANDED


def expanded_axes(mechanism: pa.Mechanism, name: str, order: str) -> tuple[int, ...]:
    """The axes of an input that have stride 0 in this memory order."""
    pattern = mechanism.inputs[name]
    if order not in EXPANDED or pattern.time_axis is None or pattern.is_pairwise:
        return ()
    if order == "expanded_tokens":
        letters = "" if pattern.is_rows else "bts"
    elif name == "v" or "s" not in pattern.letters:
        letters = ""
    else:
        letters = "b" if order == "expanded_batch" else "hnu"
    return tuple(i for i, letter in enumerate(pattern.letters) if letter in letters)


def is_expanded(mechanism: pa.Mechanism, order: str) -> bool:
    """Whether the memory order expands some input of the mechanism, or its cotangent."""
    is_of_cotangent = order == "expanded_tokens"
    return is_of_cotangent or any(expanded_axes(mechanism, n, order) for n in mechanism.inputs)


def constant(array: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """The array with its first entry along these axes repeated at all places."""
    return np.broadcast_to(_first(array, axes), array.shape).copy() if axes else array


def laid_out(
    library: Library,
    mechanism: pa.Mechanism,
    arrays: Mapping[str, Array],
    values: Mapping[str, np.ndarray],
    order: str,
) -> Arrays:
    """Inputs of a mechanism as arrays of a library with these values, in this memory order."""
    return {
        name: in_order(library, array, values[name], order, expanded_axes(mechanism, name, order))
        for name, array in arrays.items()
    }


def in_order(
    library: Library, array: Array, values: np.ndarray, order: str, axes: tuple[int, ...]
) -> Array:
    """One array with these values, in this memory order; `axes` are those that may be expanded."""
    if order in VIEWS and library.name != "jax":
        return library.view(array, order)
    return expanded(array, values, axes)


def expanded(array: Array, values: np.ndarray, axes: tuple[int, ...]) -> Array:
    """The array with stride 0 along those of the axes on which its values are constant."""
    axes = tuple(axis for axis in axes if np.array_equal(values, constant(values, (axis,))))
    if not axes:
        return array
    return namespace(array).broadcast_to(_first(array, axes), tuple(array.shape))


def _first(array: Array, axes: tuple[int, ...]) -> Array:
    return array[tuple(slice(0, 1) if i in axes else slice(None) for i in range(array.ndim))]


def cotangent_axes(order: str, rank: int) -> tuple[int, ...]:
    """The axes along which the cotangent is constant, as the cotangent of a sum is."""
    return tuple(range(rank - 1)) if order == "expanded_tokens" else ()
