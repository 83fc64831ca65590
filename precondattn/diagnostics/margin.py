"""The margin gain of CCQ: how it changes the margin of a target key over the other keys.

    (k̄★ − k̄_j) · (qᶜ − q̄) = λ (k̄_j − k̄★)ᵀ Σ q̄,    and for Σ = ρ u uᵀ:    λ ρ (β_j − α) (u·q̄)

with the target k̄★, α = k̄★·u and β_j = k̄_j·u. The second formula is the paper's Eq. 26, in which
ρ is the largest eigenvalue of Σ and u its eigenvector. The margin widens if the target is
orthogonal to the direction of largest variance and the query is not. Source: CCQ (arXiv
2606.01294), App. G.
"""

from __future__ import annotations

from precondattn.arrays import (
    Array,
    arange_like,
    as_index,
    dtype_name,
    host_array,
    library_of,
    namespace,
    take_tokens,
    upcast,
)
from precondattn.diagnostics.checks import check_floating, check_like
from precondattn.diagnostics.covariance import running_covariance
from precondattn.spec.array_functions import (
    repeat_heads,
    row_sum,
    swap_time_and_heads,
    transpose,
)
from precondattn.spec.conditioned_query import ConditionedQuery
from precondattn.spec.l2_norm import l2_norm


def margin_gain(
    q: Array, k: Array, target: Array, contraction: Array, *, rank_one: bool = False
) -> Array:
    """The change by CCQ of the margin of each query's target over every key that the query sees.

    Parameters
    ----------
    q : array (b, t, h, d)
        Queries; the last one has the position of the last key. Queries and keys are normalised to
        length 1 here, as in CCQ.
    k : array (b, s, n, d)
        Keys.
    target : integer array (b, t)
        The index of the target key of each query.
    contraction : array (b, t, h)
        CCQ's λ, in [0, 1].
    rank_one : bool
        Whether to use the paper's Eq. 26, with only the largest eigenvalue of the covariance. It is
        exact for covariances of rank one. If several eigenvalues are the largest, one of their
        eigenvectors is used.

    Returns
    -------
    array (b, h, t, s)
        The gain, in float32 for inputs in half precision. It is positive where the margin widens,
        and 0 for the target itself. NaN for keys after the query, and in rows of queries before
        their target.

    Raises
    ------
    TypeError, ValueError
        if an argument is not an array as described, or a target is not the index of a key.

    Source
    ------
    CCQ (arXiv 2606.01294), Eq. 24 to 26.

    Examples
    --------
    Keys vary along the second axis, and the target is the third:

    >>> import numpy as np, precondattn as pa
    >>> k = np.asarray([[0.8, 0.6], [0.8, -0.6], [1, 0]]).reshape(1, 3, 1, 2)
    >>> q = np.asarray([0.8, 0.6]).reshape(1, 1, 1, 2)
    >>> pa.diagnostics.margin_gain(q, k, np.asarray([[2]]), np.ones((1, 1, 1))).round(2)
    array([[[[ 0.08, -0.09,  0.  ]]]])
    """
    _check(q, k, target, contraction)
    q, k, contraction = upcast(q), upcast(k), upcast(contraction)
    xp, (_, t, h, _), s = namespace(q), q.shape, k.shape[1]
    unit_q, unit_k = l2_norm(q, 0.0), l2_norm(k, 0.0)
    if rank_one:
        sizes, vectors = xp.linalg.eigh(running_covariance(k, t))
        u = xp.repeat(vectors[..., -1], h // k.shape[2], axis=2)
        rho = xp.repeat(sizes[..., -1:], h // k.shape[2], axis=2)
        change = -contraction[..., None] * rho * u * row_sum(u * unit_q)
    else:
        change = ConditionedQuery(eps=0.0)(q, k, contraction=contraction) - unit_q
    place = as_index(target)
    wanted = repeat_heads(swap_time_and_heads(take_tokens(unit_k, place)), h)
    change, keys = swap_time_and_heads(change), repeat_heads(swap_time_and_heads(unit_k), h)
    gain = row_sum(change * wanted) - change @ transpose(keys)
    position = arange_like(t, q)[:, None] + (s - t)
    is_seen = (arange_like(s, q) <= position) & (target[:, None, :, None] <= position)
    return xp.where(is_seen, gain, float("nan"))


def _check(q: Array, k: Array, target: Array, contraction: Array) -> None:
    check_floating("k", k, "(b, s, n, d)")
    check_floating("q", q, "(b, t, h, d)")
    (b, s, n, d), (_, t, h, _) = k.shape, q.shape
    check_like("q", q, k, "(b, t, h, d)", (b, t, h, d))
    if h % n or t > s:
        raise ValueError(
            f"q must have a multiple of n = {n} heads, and at most s = {s} tokens; found shape "
            f"{tuple(q.shape)}"
        )
    check_floating("contraction", contraction, "(b, t, h)")
    check_like("contraction", contraction, k, "(b, t, h)", (b, t, h))
    if library_of(target) is None or not dtype_name(target).startswith(("int", "uint")):
        raise TypeError(f"target must be an integer array (b, t); found {target!r}")
    check_like("target", target, k, "(b, t)", (b, t))
    on_host = host_array(target)
    if on_host is not None and on_host.size and not 0 <= on_host.min() <= on_host.max() < s:
        raise ValueError(
            f"target must be numbers of keys, from 0 to s - 1 = {s - 1}; found "
            f"{on_host.min()} to {on_host.max()}"
        )
