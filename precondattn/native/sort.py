"""A sort, of which ONNX has the largest or smallest entries only."""

from __future__ import annotations

from precondattn.arrays import Array, namespace
from precondattn.native.ordinary import is_ordinary


def sort(array: Array, axis: int) -> Array:
    """The entries along an axis, the smallest first."""
    if is_ordinary(array):
        return array.topk(array.shape[axis], dim=axis, largest=False).values
    return namespace(array).sort(array, axis=axis)
