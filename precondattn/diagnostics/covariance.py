"""The running covariance of keys, with which CCQ contracts queries, and its spectrum.

    Σ_t = mean_{j≤t} k̄_j k̄_jᵀ − μ_t μ_tᵀ,    μ_t = mean_{j≤t} k̄_j,    k̄ = k / ‖k‖

For keys of length 1, 0 ≤ Σ_t ≤ 1 and tr Σ_t = 1 − ‖μ_t‖². CCQ multiplies the component of a query
along an eigenvector with eigenvalue σ by 1 − λ σ. It is made for spectra with one large eigenvalue.
Source: CCQ (arXiv 2606.01294), Eq. 8 and 12; App. I for the decay.
"""

from __future__ import annotations

from precondattn.arrays import Array, cast, namespace, placement, upcast
from precondattn.diagnostics.checks import check_floating, check_like
from precondattn.spec.conditioned_query import ConditionedQuery


def covariance_spectrum(k: Array, g: Array | None = None) -> Array:
    """The eigenvalues of the running covariance at every token, in descending order.

    Parameters
    ----------
    k : array (b, s, n, d)
        Keys, which are normalised to length 1 here, as in CCQ. A key of zeros is not changed.
    g : array (b, s, h), optional
        Log-decays, at most 0, of a base with decay: the weight of earlier keys is multiplied by eᵍ
        at each token. h is a multiple of n. CCQ takes the mean of gates for key channels.

    Returns
    -------
    array (b, s, n, d), or (b, s, h, d) with g
        The eigenvalues, in [0, 1] up to rounding, and in float32 for keys in half precision. They
        are 0 at the first token.

    Raises
    ------
    TypeError, ValueError
        if k or g are not arrays as described.

    Examples
    --------
    Keys along one axis, with both signs, and then a key orthogonal to it:

    >>> import numpy as np, precondattn as pa
    >>> k = np.asarray([[1.0, 0], [-1, 0], [1, 0], [-1, 0], [0, 1]]).reshape(1, 5, 1, 2)
    >>> pa.diagnostics.covariance_spectrum(k)[0, :, 0].round(2)
    array([[0.  , 0.  ],
           [1.  , 0.  ],
           [0.89, 0.  ],
           [1.  , 0.  ],
           [0.8 , 0.16]])
    """
    check_floating("k", k, "(b, s, n, d)")
    if g is not None:
        check_floating("g", g, "(b, s, h)")
        check_like("g", g, k, "(b, s, h)", (*k.shape[:2], g.shape[2]))
        if g.shape[2] % k.shape[2]:
            raise ValueError(
                f"g must have a multiple of n = {k.shape[2]} heads; found {g.shape[2]}"
            )
    covariance = running_covariance(k, k.shape[1], g)
    return namespace(k).flip(namespace(k).linalg.eigvalsh(covariance), axis=-1)


def running_covariance(k: Array, t: int, g: Array | None = None) -> Array:
    """Σ (b, t, heads, d, d) at the last t tokens, from CCQ's contraction of the basis vectors."""
    k = upcast(k)
    xp, (b, _, n, d) = namespace(k), k.shape
    heads = n if g is None else g.shape[2]
    basis = xp.eye(d, dtype=k.dtype, **placement(k))
    # Query head i · d + c has the basis vector c, and uses the statistics of head i.
    rows = xp.broadcast_to(xp.reshape(basis, (1, 1, 1, d, d)), (b, t, heads, d, d))
    q = xp.reshape(rows, (b, t, heads * d, d))
    one = xp.ones(q.shape[:3], dtype=k.dtype, **placement(k))
    if g is None:
        contracted = ConditionedQuery(eps=0.0)(q, k, contraction=one)
    else:
        gate = xp.repeat(cast(upcast(g), k.dtype), d, axis=2)
        contracted = ConditionedQuery(decay="head", eps=0.0)(q, k, contraction=one, g=gate)
    return basis - xp.reshape(contracted, rows.shape)
