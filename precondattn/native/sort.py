"""Sorting, for which ONNX has only an operator for the largest or smallest entries, and maxima."""

from __future__ import annotations

import math

from precondattn.arrays import Array, namespace
from precondattn.native.ordinary import is_ordinary


def sort(array: Array, axis: int) -> Array:
    """The entries along an axis in ascending order."""
    if is_ordinary(array):
        return array.topk(array.shape[axis], dim=axis, largest=False).values
    return namespace(array).sort(array, axis=axis)


def nonempty(array: Array, axis: int) -> Array:
    """The array, followed by −∞ along an axis that may be empty, and so has no maximum."""
    if not is_ordinary(array) or isinstance(array.shape[axis], int):
        return array
    shape = [*array.shape]
    shape[axis] = 1
    return namespace(array).concat([array, array.new_full(shape, -math.inf)], axis=axis)
