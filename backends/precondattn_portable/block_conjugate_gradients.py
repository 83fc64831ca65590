"""Conjugate gradients for all right sides of a matrix at once (Dubrulle's form with QR).

    A X = B,    A symmetric positive definite,    B = Q C (QR),    S = Q,

and then, until every column of C (its norm is that of the residual's column) is small enough,

    Ξ = (Sᵀ A S)⁻¹,    X += S Ξ C,    Q ζ = Q − A S Ξ (QR),    S = Q + S ζᵀ,    C = ζ C.

Every column is minimised over the search directions of all columns. So e columns need far fewer
products with A than e separate solves, above all if A has a few large eigenvalues: for the
clustered keys of LUCID, 42 products instead of 289. Q and S keep full rank where columns are
linearly dependent or 0, because QR completes Q.

Rounding makes the recurrence's residual drift from B − A X. So B − A X is computed at the end, and
the iteration is restarted from it (iterative refinement) unless

    ‖b − A x‖ ≤ τ ‖b‖ + 4 ε ‖A‖_∞ ‖x‖    for each column.

Source: Dubrulle 2001, Retooling the method of block conjugate gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from precondattn.arrays import Array, has_only_a_shape, namespace
from precondattn.spec.array_functions import identity_like, transpose
from precondattn.spec.positive_definite import ROUNDINGS, NotSolvedError, solve_positive
from precondattn_portable.arithmetic import Arithmetic

Product = Callable[[Array], Array]
"""A X, of X (b, n, s, columns)"""


class Residual(NamedTuple):
    """The norm of each column's residual, and the largest norm allowed (b, n, 1, e)."""

    length: Array
    allowed: Array

    def is_large(self) -> Array:
        """The columns to iterate on; none with NaN, which more steps would not change."""
        return self.length > self.allowed

    def is_small(self) -> Array:
        return self.length <= self.allowed

    def worst(self, of_right: Array) -> float:
        """The largest residual, relative to the norm of its right side."""
        xp = namespace(of_right)
        share = self.length / xp.where(of_right > 0, of_right, 1.0)
        return float(xp.max(xp.where(self.is_large(), share, 0.0)))


class Directions(NamedTuple):
    """The state of the iteration: X, Q, S and C."""

    x: Array
    q: Array
    s: Array
    c: Array

    @classmethod
    def towards(cls, right: Array) -> Directions:
        q, c = namespace(right).linalg.qr(right)
        return cls(right * 0, q, q, c)

    def advanced(self, ops: Arithmetic, times: Product) -> Directions:
        """The state after one more product with A."""
        xp, image = namespace(self.s), times(self.s)
        gram = ops.product(transpose(self.s), image)
        inverse = solve_positive(0.5 * (gram + transpose(gram)), identity_like(gram) + 0.0 * gram)
        along = ops.product(inverse, self.c)
        x = self.x + ops.product(self.s, along)
        q, z = xp.linalg.qr(self.q - ops.product(image, inverse))
        s = ops.add(ops.product(self.s, transpose(z)), q)
        return Directions(x, q, s, ops.product(z, self.c))


def lengths(x: Array, axis: int = -2) -> Array:
    """‖x‖ of every column (b, n, 1, e), or along another axis."""
    xp = namespace(x)
    return xp.sqrt(xp.sum(x * x, axis=axis, keepdims=True))


def sizes(right: Array, axis: int = -2) -> Array:
    """The largest entry of every column (b, n, 1, e), or of another axis; 1 where none is."""
    xp = namespace(right)
    size = xp.max(xp.abs(right), axis=axis, keepdims=True)
    return xp.where((size > 0) & xp.isfinite(size), size, 1.0)


def residual(times: Product, x: Array, right: Array, wanted: Array) -> tuple[Array, Residual]:
    """B − A X, and its columns, of which `wanted` is τ ‖b‖."""
    xp, columns = namespace(x), x.shape[-1]
    image = times(xp.concat([x, xp.ones_like(x[..., :1])], axis=-1))
    norm = xp.max(xp.abs(image[..., columns:]), axis=-2, keepdims=True)
    rest = right - image[..., :columns]
    rounding = ROUNDINGS * float(xp.finfo(x.dtype).eps) * norm * lengths(x)
    return rest, Residual(lengths(rest), wanted + rounding)


def solved(
    ops: Arithmetic, times: Product, right: Array, tolerance: float, iterations: int
) -> Array:
    """X with A X = B, for a product with A whose entries are not negative.

    Raises a NotSolvedError where the residual of a column is not reached.
    """
    xp = namespace(right)
    size = sizes(right)
    right = right / size
    wanted = tolerance * lengths(right)
    x, rest, used = right * 0, right, 0
    if has_only_a_shape(right):
        return right
    while True:
        step = Directions.towards(rest)
        while used < iterations and xp.any(Residual(lengths(step.c), wanted).is_large()):
            step = step.advanced(ops, times)
            used += 1
        x = x + step.x
        rest, left = residual(times, x, right, wanted)
        if not xp.any(left.is_large()):
            return x * size
        if used == iterations:
            worst = left.worst(lengths(right))
            raise NotSolvedError(
                f"conjugate gradients left a residual of {worst:.1e} of the right side after "
                f"{iterations} iterations, and {tolerance:.0e} is expected; give more iterations, "
                f"a larger tolerance or a matrix with a larger smallest eigenvalue"
            )
