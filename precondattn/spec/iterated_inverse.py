"""The pseudo-inverse of a matrix with rows that sum to 1, by iteration.

    Z_0 = Aᵀ / c,    c = max_j Σ_i A_ij
    Z ← ¼ Z P,    P = 13 I − X (15 I − X (7 I − X)),    X = A Z

c is the product of the largest sums of a row, 1, and of a column. Source: Nyströmformer, Eq. 14.
Rows and columns of A that are 0 give columns and rows of Z that are 0.

Gradient, for each step from the last to the first,

    dP = ¼ Zᵀ dZ',    dX = −15 dP + 7 (dP Xᵀ + Xᵀ dP) − (dP X²ᵀ + Xᵀ dP Xᵀ + X²ᵀ dP)
    dA += dX Zᵀ,      dZ = ¼ dZ' Pᵀ + Aᵀ dX

and at the start dA += dZ_0ᵀ / c, dc = −Σ dZ_0 ∘ Z_0 / c, which goes to the columns with the largest
sum, to equal parts.
"""

from __future__ import annotations

from precondattn.arrays import Array, cast, namespace
from precondattn.spec.array_functions import identity_like, transpose


def largest_sum(a: Array, *, of_all: bool) -> tuple[Array, Array]:
    """c, 1 where it is 0, and the derivative of c by each column's sum (…, 1, m)."""
    xp = namespace(a)
    axes = tuple(range(a.ndim)) if of_all else (-1,)
    sums = xp.sum(a, axis=-2, keepdims=True)
    largest = xp.max(sums, axis=axes, keepdims=True)
    share = cast(sums == largest, a.dtype)
    share = share / xp.sum(share, axis=axes, keepdims=True)
    return xp.where(largest == 0, 1.0, largest), share  # NaN stays NaN.


def _polynomial(x: Array) -> tuple[Array, Array]:
    """P = 13 I − 15 X + 7 X² − X³, and X²."""
    square = x @ x
    return 13 * identity_like(x) - 15 * x + 7 * square - square @ x, square


def _starts(a: Array, iterations: int, *, of_all: bool) -> list[Array]:
    """Z before each step, and after the last."""
    c, _ = largest_sum(a, of_all=of_all)
    z = [transpose(a) / c]
    for _ in range(iterations):
        z.append(0.25 * z[-1] @ _polynomial(a @ z[-1])[0])
    return z


def iterated_inverse(a: Array, iterations: int, *, of_all: bool) -> Array:
    """Z ≈ A⁺ of matrices A (b, h, m, m); with `of_all` c is the largest of all matrices."""
    return _starts(a, iterations, of_all=of_all)[-1]


def iterated_inverse_vjp(a: Array, iterations: int, d_z: Array, *, of_all: bool) -> Array:
    """The gradient of A."""
    xp = namespace(a)
    d_a = xp.zeros_like(a)
    before = _starts(a, iterations, of_all=of_all)[:-1]
    for z in reversed(before):
        x = a @ z
        p, square = _polynomial(x)
        x, square = transpose(x), transpose(square)
        d_p = 0.25 * transpose(z) @ d_z
        d_x = 7 * (d_p @ x + x @ d_p) - (d_p @ square + x @ d_p @ x + square @ d_p) - 15 * d_p
        d_a = d_a + d_x @ transpose(z)
        d_z = 0.25 * d_z @ transpose(p) + transpose(a) @ d_x
    c, share = largest_sum(a, of_all=of_all)
    axes = tuple(range(a.ndim)) if of_all else (-2, -1)
    d_c = -xp.sum(d_z * before[0], axis=axes, keepdims=True) / c
    return d_a + transpose(d_z) / c + d_c * share
