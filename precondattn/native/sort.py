"""Sorting; ONNX has only an operator for the largest or smallest entries."""

from __future__ import annotations

from precondattn.arrays import Array, namespace
from precondattn.native.ordinary import is_ordinary


def sort(array: Array, axis: int) -> Array:
    """The entries along an axis in ascending order."""
    if is_ordinary(array):
        return array.topk(array.shape[axis], dim=axis, largest=False).values
    return namespace(array).sort(array, axis=axis)
