"""The alignment of keys with the directions in which keys vary most.

    a_t = ‖Uᵀ (k̄_t − m)‖² / ‖k̄_t − m‖²,    U the top eigenvectors of the covariance of k̄, m its mean

CCQ contracts queries along U. It helps if relevant keys have a small alignment and distractors a
large one, that is, if the gap between their means is negative. Source: CCQ (arXiv 2606.01294),
App. H, Eq. 28 and 29.
"""

from __future__ import annotations

from precondattn.arrays import Array, cast, dtype_name, namespace, upcast
from precondattn.diagnostics.checks import check_floating, check_like
from precondattn.given import whole_number
from precondattn.spec.l2_norm import l2_norm


def alignment(k: Array, rank: int = 16) -> Array:
    """The share, in [0, 1], of each key's centred squared norm in the top eigenspace of its head.

    Parameters
    ----------
    k : array (b, s, n, d)
        Keys, which are normalised to length 1 here, as in CCQ.
    rank : int
        The number of eigenvectors, 1 ≤ rank ≤ d; the paper uses 16 of 128 or 256.

    Returns
    -------
    array (b, s, n)
        The share for each key, in float32 for keys in half precision. NaN for a key that equals
        the mean of its head's keys up to rounding.

    Raises
    ------
    TypeError, ValueError
        if k is not an array of four axes, or the rank is out of range.

    Source
    ------
    CCQ (arXiv 2606.01294), App. H, Eq. 28.

    Examples
    --------
    Four keys along one axis, and one key orthogonal to it:

    >>> import numpy as np, precondattn as pa
    >>> k = np.asarray([[1.0, 0], [-1, 0], [1, 0], [-1, 0], [0, 1]]).reshape(1, 5, 1, 2)
    >>> pa.alignment(k, rank=1).round(2).ravel()
    array([0.96, 0.96, 0.96, 0.96, 0.  ])
    """
    rank = _checked_rank(k, rank)
    xp = namespace(k)
    unit = xp.permute_dims(l2_norm(upcast(k), 0.0), (0, 2, 1, 3))  # (b, n, s, d)
    centred = unit - xp.mean(unit, axis=2, keepdims=True)
    covariance = xp.matrix_transpose(centred) @ centred  # The scale does not affect eigenvectors.
    top = xp.linalg.eigh(covariance)[1][..., -rank:]
    energy = xp.sum(centred * centred, axis=-1)
    within = xp.sum((centred @ top) ** 2, axis=-1)
    eps = xp.finfo(unit.dtype).eps
    is_mean = energy <= k.shape[3] * (16 * eps) ** 2  # Up to rounding.
    share = within / xp.where(is_mean, 1.0, energy)
    return xp.permute_dims(xp.where(is_mean, float("nan"), share), (0, 2, 1))


def alignment_gap(k: Array, needle: Array, context: Array | None = None, rank: int = 16) -> Array:
    """The mean alignment of the relevant keys minus that of the others; CCQ assumes it is below 0.

    Parameters
    ----------
    k : array (b, s, n, d)
        Keys.
    needle : boolean array (b, s)
        True for the relevant tokens (the needle).
    context : boolean array (b, s), optional
        True for the tokens to compare with; by default all others. The paper excludes the question
        at the end.
    rank : int
        As in `alignment`.

    Returns
    -------
    array (b, n)
        The gap for each sequence and head. NaN if a sequence has no needle or no context. Keys
        whose alignment is NaN are ignored.

    Source
    ------
    CCQ (arXiv 2606.01294), App. H, Eq. 29.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> k = np.asarray([[1.0, 0], [-1, 0], [1, 0], [-1, 0], [0, 1]]).reshape(1, 5, 1, 2)
    >>> needle = np.asarray([[False, False, False, False, True]])
    >>> pa.alignment_gap(k, needle, rank=1).round(2)
    array([[-0.96]])
    """
    _checked_rank(k, rank)
    _check_tokens("needle", needle, k)
    if context is None:
        context = namespace(k).logical_not(needle)
    _check_tokens("context", context, k)
    share = alignment(k, rank)
    return _mean_of(share, needle) - _mean_of(share, context)


def _mean_of(share: Array, tokens: Array) -> Array:
    """The mean of `share` (b, s, n) over the chosen tokens (b, s), ignoring NaN."""
    xp = namespace(share)
    chosen = tokens[:, :, None] & (share == share)
    total = xp.sum(xp.where(chosen, share, 0.0), axis=1)
    count = xp.sum(cast(chosen, share.dtype), axis=1)
    return xp.where(count > 0, total / xp.where(count > 0, count, 1.0), float("nan"))


def _checked_rank(k: Array, rank: int) -> int:
    check_floating("k", k, "(b, s, n, d)")
    number = whole_number(rank)
    if number is None or not 1 <= number <= k.shape[3]:
        raise ValueError(f"rank must be a whole number from 1 to d = {k.shape[3]}; found {rank!r}")
    return number


def _check_tokens(name: str, tokens: Array, k: Array) -> None:
    check_like(name, tokens, k, "(b, s)", tuple(k.shape[:2]))
    if dtype_name(tokens) != "bool":
        raise ValueError(f"{name} must be boolean; found {dtype_name(tokens)}")
