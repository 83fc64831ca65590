"""The Cholesky factor, which the array-API standard has as an extension and ONNX has not."""

from __future__ import annotations

from precondattn.arrays import Array, namespace
from precondattn.native.ordinary import is_ordinary


def cholesky(matrix: Array) -> Array:
    """The lower-triangular L of A = L Lᵀ, for matrices (…, s, s)."""
    if is_ordinary(matrix):
        from precondattn.native import torch_cholesky

        return torch_cholesky.cholesky(matrix)
    return namespace(matrix).linalg.cholesky(matrix)
