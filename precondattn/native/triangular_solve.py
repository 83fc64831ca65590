"""Triangular solves, which the array-API standard does not have."""

from __future__ import annotations

from precondattn.arrays import Array, library_of, namespace
from precondattn.native.ordinary import is_ordinary


def solve_triangular(matrix: Array, right: Array, *, lower: bool) -> Array | None:
    """The solution matrix⁻¹ right (…, s, e); None if the library has no triangular solver."""
    if is_ordinary(matrix):
        from precondattn.native import torch_solve  # Imports PyTorch, which is already loaded here.

        return torch_solve.solve_triangular(matrix, right, lower=lower)
    library = library_of(matrix)
    if library == "torch":
        # The general solver may never return with several threads (PyTorch 2.13, oneMKL).
        return namespace(matrix).linalg.solve_triangular(matrix, right, upper=not lower)
    if library == "jax":
        from precondattn.native import jax_solve  # Imports JAX, which is already loaded here.

        return jax_solve.solve_triangular(matrix, right, lower=lower)
    return None
