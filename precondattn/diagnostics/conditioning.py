"""The condition number κ of matrices, and its upper bound μ.

    κ(A) = σ₁ / σ_k,    μ(A) = 2 / (σ₁ ⋯ σ_k) (‖A‖_F / √k)^k,    κ ≤ μ,    k = min(n, d)

with the singular values σ₁ ≥ … ≥ σ_k of a matrix A with n rows and d columns. They motivate
preconditioned attention (row norms), where A is the output of a head. The bound is that of
Guggenheimer, Edelman and Johnson (1995).

Both are computed from σ / σ₁, so that the scale of A does not matter. μ, a product of k numbers,
may overflow; its logarithm does not.
"""

from __future__ import annotations

import math

from precondattn.arrays import Array, namespace, upcast
from precondattn.diagnostics.checks import check_floating


def condition_number(a: Array) -> Array:
    """The condition number κ = σ₁ / σ_k of every matrix, at least 1.

    Parameters
    ----------
    a : array (…, n, d)
        Matrices. In the paper they are the outputs of heads: swap axes 1 and 2 of a mechanism's
        output (b, t, h, e).

    Returns
    -------
    array (…)
        κ, in float32 for matrices in half precision. ∞ if the smallest singular value is 0. If the
        rank is less than k = min(n, d), rounding may give a number of the order of 1 / ε instead.

    Raises
    ------
    TypeError, ValueError
        if a is not a floating-point array with at least two axes, or a matrix is empty.

    Source
    ------
    Preconditioned Attention (arXiv 2603.27153), Definition 4.1.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> pa.diagnostics.condition_number(np.diag([4.0, 2.0, 1.0])).item()
    4.0

    The outputs of two heads:

    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 64, 2, 4))
    >>> out = np.moveaxis(pa.softmax(q, k, v), 2, 1)
    >>> pa.diagnostics.condition_number(out).round(1)
    array([[2.3, 2.7]])
    """
    share = _singular_values(a)
    xp = namespace(share)
    smallest = share[..., -1]
    is_full = smallest > 0
    return xp.where(is_full, 1.0 / xp.where(is_full, smallest, 1.0), math.inf)


def log_mu(a: Array) -> Array:
    """The logarithm of μ of every matrix, Guggenheimer's bound on the condition number (κ ≤ μ).

    Parameters
    ----------
    a : array (…, n, d)
        As in `condition_number`.

    Returns
    -------
    array (…)
        log μ, at least log 2, which is reached if all singular values are equal. ∞ if one is 0.

    Raises
    ------
    TypeError, ValueError
        like `condition_number`.

    Source
    ------
    Preconditioned Attention (arXiv 2603.27153), Theorem 4.2 and Eq. 10.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> a = np.diag([4.0, 2.0, 1.0])
    >>> pa.diagnostics.log_mu(a).round(2).item()  # log(2 / 8 · √7³)
    1.53
    >>> pa.diagnostics.log_mu(100 * np.eye(500)).round(2).item()  # log 2
    0.69
    """
    share = _singular_values(a)
    xp = namespace(share)
    is_full = share[..., -1] > 0
    share = xp.where(share > 0, share, 1.0)
    root_mean_square = xp.sqrt(xp.mean(share * share, axis=-1, keepdims=True))
    logs = xp.log(root_mean_square) - xp.log(share)
    return xp.where(is_full, math.log(2) + xp.sum(logs, axis=-1), math.inf)


def _singular_values(a: Array) -> Array:
    """The singular values σ / σ₁ of every matrix, in descending order; 0 for a matrix of zeros."""
    check_floating("a", a, "(..., n, d)")
    if 0 in a.shape[-2:]:
        raise ValueError(f"a must have a row and a column; found shape {tuple(a.shape)}")
    sigma = namespace(a).linalg.svdvals(upcast(a))
    largest = sigma[..., :1]
    return sigma / namespace(a).where(largest > 0, largest, 1.0)
