"""The Jacobian of LUCID's output with respect to keys, which the paper does not derive.

With o_t = Σ_i a_ti y_i, E y = diag(β) v, E = I + diag(β) stril(Φ), and the normalised keys
n_j = k_j / r_j (RMS norm 1) in Φ_ij = exp(σ ⟨n_i, n_j⟩ − σ d), a key affects o_t in two ways:

    ∂o_t/∂k_j = s a_tj (y_j − o_t) q_tᵀ                                      through softmax
              − σ (u_tj Σ_{l<j} Φ_jl y_l n_lᵀ + y_j Σ_{i>j} u_ti Φ_ij n_iᵀ) R_j      through Φ

    u_t = diag(β) E⁻ᵀ a_t    the weights of v in o_t = Σ_i u_ti v_i
    R_j = (I − n_j n_jᵀ / d) / r_j    the derivative of the norm

because dy = −E⁻¹ diag(β) stril(dΦ) y, and dΦ_ij = σ Φ_ij (n_j·dn_i + n_i·dn_j). If softmax is
one-hot, the first part vanishes, like the Jacobian with respect to q_t; the second does not.

Source: LUCID (arXiv 2602.10410) 3.2 and A.1 for the Jacobian with respect to queries; the one with
respect to keys is derived here.
"""

from __future__ import annotations

from typing import NamedTuple

from precondattn.arrays import Array, namespace, upcast
from precondattn.frame import FULL, Frame, Layout
from precondattn.preconditioners.lucid import Lucid
from precondattn.spec.array_functions import (
    identity_like,
    mask_scores,
    repeat_heads,
    softmax,
    solve_lower,
    solve_upper,
    swap_time_and_heads,
    transpose,
)
from precondattn.spec.rms_norm import rms, rms_norm_vjp
from precondattn.spec.softmax import Softmax


class KeyJacobian(NamedTuple):
    """The two parts of the Jacobian ∂o/∂k, each (b, t, h, e, s, d); ∂o/∂k is their sum."""

    through_softmax: Array
    """The part through the attention weights a."""
    through_preconditioner: Array
    """The part through Φ and the norm of its keys."""


def lucid_key_jacobian(
    attn: Lucid, q: Array, k: Array, v: Array, lucid_beta: Array | None = None
) -> KeyJacobian:
    """The derivative of every output of LUCID with respect to every key of its head.

    Entry [b, t, h, c, j, m] is the derivative of o[b, t, h, c] with respect to
    k[b, j, ⌊h n / H⌋, m], for H query heads and n key/value heads. With fewer queries than keys,
    the queries are the last tokens; for a long sequence one query is enough.

    Parameters
    ----------
    attn : Lucid
        LUCID with normalize="keys" around causal softmax. Both may have a scale, softmax a window,
        and LUCID an eps and a beta.
    q : array (b, t, H, d)
    k : array (b, s, n, d)
    v : array (b, s, n, e)
    lucid_beta : array (b, s, n), optional
        Strengths in [0, 2], if `attn` has beta=True.

    Returns
    -------
    KeyJacobian
        The named tuple of `through_softmax` and `through_preconditioner`, each (b, t, H, e, s, d),
        in float32 for arrays in half precision.

    Raises
    ------
    ValueError
        for another mechanism or other options.
    TypeError, ValueError
        for invalid arrays, as in a call.

    Source
    ------
    LUCID (arXiv 2602.10410) 3.2, "a similar analysis for keys can be done"; derived here.

    Examples
    --------
    If softmax is one-hot, keys affect the output only through Φ:

    >>> import numpy as np, precondattn as pa
    >>> k, v = np.random.default_rng(0).normal(size=(2, 1, 6, 1, 4))
    >>> sharp = pa.Lucid(pa.Softmax(scale=1e3), scale=0.5)
    >>> parts = pa.diagnostics.lucid_key_jacobian(sharp, k, k, v)
    >>> parts.through_softmax.shape
    (1, 6, 1, 4, 6, 4)
    >>> [bool(np.abs(part).max() > 1e-6) for part in parts]
    [False, True]
    """
    from precondattn.execution.arguments import check_call

    base = _base_of(attn)
    named = {} if lucid_beta is None else {"lucid_beta": lucid_beta}
    check_call(attn, (q, k, v), named, {})
    heads, d = q.shape[2:]
    q, k, v = (swap_time_and_heads(upcast(x)) for x in (q, k, v))
    frame = Frame.of(Layout(FULL, q.shape[2], k.shape[2]), q)
    base_scale = base.scale_for(d)
    scale = base_scale if attn.scale is None else attn.scale
    k, v = repeat_heads(k, heads), repeat_heads(v, heads)
    beta = namespace(k).ones_like(k[..., :1])
    if lucid_beta is not None:
        beta = repeat_heads(swap_time_and_heads(upcast(lucid_beta))[..., None], heads)

    n = k / rms(k, attn.eps)
    below = frame.among_keys(k.shape[2]).visible(causal=True, window=base.window, strict=True)
    phi = namespace(k).exp(mask_scores(below, scale * (n @ transpose(n)) - scale * d))
    matrix = identity_like(phi) + beta * phi
    y = solve_lower(matrix, beta * v)
    visible = frame.visible(causal=True, window=base.window)
    a = softmax(mask_scores(visible, base_scale * (q @ transpose(k))))
    u = transpose(beta * solve_upper(transpose(matrix), transpose(a)))
    return KeyJacobian(
        _in_order(base_scale * _through_softmax(q, a, y)),
        _in_order(-scale * rms_norm_vjp(_of(k), attn.eps, _through_phi(phi, u, y, n))),
    )


def _of(per_key: Array) -> Array:
    """An array (b, h, s, d), reshaped to broadcast with (b, h, t, e, s, d)."""
    return per_key[:, :, None, None, ...]


def _through_softmax(q: Array, a: Array, y: Array) -> Array:
    """The array a_tj (y_j − o_t) q_tᵀ (b, h, t, e, s, d)."""
    from_output = transpose(y)[:, :, None, ...] - (a @ y)[..., None]  # (b, h, t, e, s)
    return (a[:, :, :, None, :] * from_output)[..., None] * q[:, :, :, None, None, :]


def _through_phi(phi: Array, u: Array, y: Array, n: Array) -> Array:
    """The array u_tj Σ_{l<j} Φ_jl y_l n_lᵀ + y_j Σ_{i>j} u_ti Φ_ij n_iᵀ (b, h, t, e, s, d)."""
    columns = transpose(y)[..., None] * n[:, :, None, ...]  # y_l n_lᵀ as (b, h, e, s, d)
    as_row = phi[:, :, None, ...] @ columns
    as_column = transpose(phi)[:, :, None, ...] @ (
        u[..., None] * n[:, :, None, ...]
    )  # (b, h, t, s, d)
    return (
        u[:, :, :, None, :, None] * as_row[:, :, None, ...]
        + transpose(y)[:, :, None, ..., None] * as_column[:, :, :, None, ...]
    )


def _in_order(x: Array) -> Array:
    """The array (b, h, t, e, s, d) with axes (b, t, h, e, s, d)."""
    return namespace(x).permute_dims(x, (0, 2, 1, 3, 4, 5))


def _base_of(attn: Lucid) -> Softmax:
    """The base of a mechanism to which the formula applies; otherwise raises an error."""
    if type(attn) is not Lucid:
        raise TypeError(f"attn must be a Lucid; found {attn!r}")
    if attn.normalize != "keys":
        raise ValueError(
            f"lucid_key_jacobian is derived for normalize='keys'; found {attn.normalize!r}"
        )
    base = attn.base
    if type(base) is not Softmax or base != Softmax(scale=base.scale, window=base.window):
        raise ValueError(
            f"lucid_key_jacobian is derived for causal softmax with no options but scale and "
            f"window; found {base}"
        )
    return base
