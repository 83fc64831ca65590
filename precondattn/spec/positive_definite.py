"""Systems with a symmetric positive-definite matrix, by Cholesky's factorization A = L Lᵀ.

A x = b:    L z = b,    Lᵀ x = z
"""

from __future__ import annotations

import math

from precondattn.algebra.registry import AnyMechanism
from precondattn.arrays import Array, cholesky, namespace
from precondattn.spec.array_functions import identity_like, solve_lower, solve_upper, transpose

ROUNDINGS = 4.0
"""Roundings of a product with a matrix that the residual of a solve by iteration may be made of."""


class NotSolvedError(ArithmeticError):
    """A system of equations could not be solved to the accuracy that was asked for."""


def solve_positive(matrix: Array, right: Array) -> Array:
    """matrix⁻¹ right, for matrices (…, s, s) and right sides (…, s, e).

    NaN for a matrix with an entry that is not finite. Raises a NotSolvedError for one that is not
    positive definite, or has no such factor in its dtype; under JAX, and in an exported program of
    ordinary operators, the solution is NaN.
    """
    xp = namespace(matrix, right)
    is_finite = xp.all(xp.isfinite(matrix), axis=(-2, -1), keepdims=True)
    try:
        lower = cholesky(xp.where(is_finite, matrix, identity_like(matrix)))
    except (ValueError, RuntimeError) as error:  # The LinAlgError of NumPy, and that of PyTorch.
        raise NotSolvedError(
            f"a matrix is not positive definite in {matrix.dtype}, after rounding"
        ) from error
    solution = solve_upper(transpose(lower), solve_lower(lower, right))
    return xp.where(is_finite, solution, math.nan)


def tolerance_of(leaf: AnyMechanism, x: Array) -> float:
    """τ of a leaf that solves by iteration, for right sides like x."""
    if leaf.tolerance is not None:
        return float(leaf.tolerance)
    return 1e-13 if x.dtype == namespace(x).float64 else 1e-6
