"""The parallel form of the recurrence: all pairs of tokens at once.

With G = cumsum(g), D_ij = e^{G_i − G_j} for j ≤ i, and the state S_0 before the first token,

    (I + diag(β) stril(D ∘ a kᵀ)) U = diag(β) (V − e^{G} ∘ a S_0)      (additive: U = V),
    O = e^{G} ∘ q S_0 + tril(D ∘ q kᵀ) U,
    S = e^{G_N} S_0 + (e^{G_N − G} ∘ k)ᵀ U.

Where a is erased from the undecayed state, its rows have G_{i−1} in place of G_i.

Source: LUCID Table 1 and 3.4; gated DeltaNet (arXiv 2412.06464) Eq. 10. With one decay per key
channel D is inside the products, A_ij = Σ_c q_ic k_jc e^{G_ic − G_jc}; with one per value channel
it is inside the sum over j. This form is quadratic in the number of tokens. It exponentiates
differences of sums, which lose the digits of all gates that follow a nearly closed one, so it is
used only in tests with moderate gates.
"""

from __future__ import annotations

import math

from precondattn.arrays import Array, arange_like, namespace
from precondattn.spec.array_functions import (
    identity_like,
    next_token,
    previous_token,
    solve_lower,
    transpose,
)
from precondattn.spec.recurrence import Stream, erased


def parallel(x: Stream, state: Array) -> tuple[Array, Array]:
    """The outputs (b, m, t, r, e), and the final state (b, m, d, e)."""
    xp = namespace(x.k)
    t, s = x.q.shape[2], x.k.shape[2]
    total = xp.cumulative_sum(x.g, axis=2)  # G, (b, m, s, 1 or d, 1 or e)
    by_value = x.g.shape[-1] > 1
    if x.beta is not None and by_value:
        raise ValueError("the delta rule has no gate for each value channel here")

    u = x.v
    if x.beta is not None:
        a, before = erased(x), total[..., 0]
        if x.undecayed is None:
            among_keys = _weights(a[:, :, :, None, :], x.k, total)[:, :, :, 0, :]
        else:
            rows, before = next_token(a)[:, :, :, None, :], previous_token(before)
            among_keys = previous_token(_weights(rows, x.k, total)[:, :, :, 0, :])
        below = x.beta[..., None] * xp.tril(among_keys, k=-1)
        from_state = (xp.exp(before) * a) @ state
        u = solve_lower(identity_like(below) + below, x.beta[..., None] * (x.v - from_state))

    query_total = total[:, :, s - t :, ...]
    if by_value:
        o = (x.q @ state[:, :, None, ...]) * xp.exp(query_total)
        a = x.q @ transpose(x.k)[:, :, None, ...]  # (b, m, t, r, s)
        o = o + xp.sum(
            a[..., None] * (_decay(total[..., 0, :], t) * u[:, :, None, :, :])[:, :, :, None, ...],
            axis=-2,
        )
    else:
        o = (x.q * xp.exp(query_total)[..., 0][..., None, :]) @ state[:, :, None, ...]
        o = o + _weights(x.q, x.k, total) @ u[:, :, None, ...]

    last = total[:, :, -1:, ...]
    to_end = xp.exp(last - total)
    if by_value:
        final = xp.exp(last[:, :, 0, ...]) * state + transpose(x.k) @ (to_end[..., 0, :] * u)
    else:
        final = xp.exp(last[:, :, 0, ...]) * state + transpose(to_end[..., 0] * x.k) @ u
    return o, final


def _weights(q: Array, k: Array, total: Array) -> Array:
    """Σ_c q_ic k_jc e^{G_ic − G_jc} (b, m, t, r, s), 0 for j > i; G per key channel or token."""
    xp = namespace(q)
    decay = _decay(total[..., 0], q.shape[2])  # (b, m, t, s, 1 or d)
    if decay.shape[-1] == 1:
        return (q @ transpose(k)[:, :, None, ...]) * decay[..., 0][:, :, :, None, :]
    pairs = q[..., None, :] * k[:, :, None, None, :, :] * decay[:, :, :, None, :, :]
    return xp.sum(pairs, axis=-1)


def _decay(total: Array, t: int) -> Array:
    """e^{G_i − G_j} of the last t tokens i to all j (b, m, t, s, c), 0 for j > i."""
    xp = namespace(total)
    s = total.shape[2]
    token = arange_like(s, total)
    visible = (token[None, :] <= token[s - t :, None])[..., None]
    exponent = total[:, :, s - t :, None, :] - total[:, :, None, :, :]
    return xp.exp(xp.where(visible, exponent, -math.inf))
