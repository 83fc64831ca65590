"""A scaling of rows that never increases μ, which Theorem 4.4 claims for the row norm.

    L = diag(√ℓ_i / ‖A_i‖),    ℓ_i = A_iᵀ (AᵀA)⁺ A_i,    μ(LA) ≤ μ(A)

The leverage ℓ_i in [0, 1] says how far row i is independent of the other rows; leverages sum to the
rank k. With full rank and at most as many rows as columns, all are 1, and L is the row norm. The
proof:

    log μ(A) − log μ(LA) ≥ k/2 KL(ℓ/k ‖ ‖A_i‖² / ‖A‖_F²) ≥ 0

is on the page `claims/row_norm`. Repeating the scaling is the multiplicative algorithm for
D-optimal designs (Silvey, Titterington and Torsney 1978), whose limit has the smallest μ of all row
scalings.
"""

from __future__ import annotations

from precondattn.arrays import Array, cast, namespace, upcast
from precondattn.diagnostics.checks import check_floating
from precondattn.given import at_least
from precondattn.spec.array_functions import row_sum


def leverage_scaling(a: Array, steps: int = 1) -> Array:
    """The factor for each row of A that scales the row to length √ℓ_i, where ℓ_i is its leverage.

    Parameters
    ----------
    a : array (…, n, d)
        Matrices, such as the outputs (b, h, t, e) of attention heads.
    steps : int
        The number of repetitions, at least 1. Each one decreases μ, towards the smallest value that
        a scaling of rows can reach. In the limit, the factors of some rows may be 0.

    Returns
    -------
    array (…, n)
        Positive factors, 1 for a row of zeros; in float32 for matrices in half precision.

    Raises
    ------
    TypeError, ValueError
        if a is not a floating-point array with at least two axes, or steps is not a positive
        integer.

    Examples
    --------
    Two orthogonal columns of length 3; the row norm makes their lengths unequal, but this does not:

    >>> import numpy as np, precondattn as pa
    >>> a = np.asarray([[3.0, 0]] + 9 * [[0, 1.0]])
    >>> rows = pa.diagnostics.leverage_scaling(a)[:, None] * a
    >>> np.linalg.norm(rows, axis=0).round(6)
    array([1., 1.])
    >>> norm = a / np.linalg.norm(a, axis=1, keepdims=True)
    >>> [np.linalg.cond(x).round(6).item() for x in (a, norm, rows)]
    [1.0, 3.0, 1.0]
    """
    check_floating("a", a, "(..., n, d)")
    steps, a = at_least(1, "steps", steps), upcast(a)
    xp = namespace(a)
    factors = xp.ones_like(a[..., 0])
    for _ in range(steps):
        scaled = factors[..., None] * a
        length = xp.sqrt(row_sum(scaled * scaled)[..., 0])
        is_row = length > 0
        wanted = xp.where(is_row, xp.sqrt(_leverage(scaled)), 1.0)
        factors = factors * wanted / xp.where(is_row, length, 1.0)
    return factors


def _leverage(a: Array) -> Array:
    """The leverages ℓ_i: squared row lengths of an orthonormal basis of the column space."""
    xp = namespace(a)
    u, sigma, _ = xp.linalg.svd(a, full_matrices=False)
    negligible = max(a.shape[-2:]) * xp.finfo(a.dtype).eps * sigma[..., :1]
    return xp.sum(u * u * cast(sigma > negligible, a.dtype)[..., None, :], axis=-1)
