"""The solve of triangular systems, which the array-API standard does not have."""

from __future__ import annotations

from precondattn.arrays import Array, library_of, namespace
from precondattn.native.ordinary import is_ordinary


def solve_triangular(matrix: Array, right: Array, *, lower: bool) -> Array | None:
    """matrix⁻¹ right, of stacks (…, s, s) and (…, s, e); None where the library has no solver."""
    if is_ordinary(matrix):
        from precondattn.native import torch_solve  # Imports PyTorch, which is already loaded here.

        return torch_solve.solve_triangular(matrix, right, lower=lower)
    library = library_of(matrix)
    if library == "torch":
        # With more than one thread, the general solver may never return (PyTorch 2.13, oneMKL).
        return namespace(matrix).linalg.solve_triangular(matrix, right, upper=not lower)
    if library == "jax":
        from precondattn.native import jax_solve  # Imports JAX, which is already loaded here.

        return jax_solve.solve_triangular(matrix, right, lower=lower)
    return None
