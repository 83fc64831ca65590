"""The chunkwise form of the recurrence: products within chunks of C tokens, a state between them.

With G the sum of g from the start of the chunk, and S the state before the chunk,

    U = (I + diag(β) stril(D ∘ A Kᵀ))⁻¹ diag(β) (V − e^{G} ∘ A S)      (additive: U = V),
    O = e^{G} ∘ Q S + tril(D ∘ Q Kᵀ) U,
    S ← e^{G_C} ∘ S + (e^{G_C − G} ∘ K)ᵀ U,        D_ij = e^{G_i − G_j}.

Where A is erased from the undecayed state, its rows have G_{i−1} in place of G_i.

Linear in the number of tokens: the form that fast implementations have. Source: gated DeltaNet
(arXiv 2412.06464) 3.3; GLA (arXiv 2312.06635) 4.3 for the two levels below.

Only differences of sums that are ≤ 0 are exponentiated. With one decay for each key channel D does
not factor out of the product, and the factors e^{G_i} and e^{−G_j} can overflow. So chunks are
split into sub-chunks. Between two sub-chunks both factors are relative to the start a of the
query's sub-chunk, e^{G_i − G_a} ≤ 1 and e^{G_a − G_j} ≤ 1; within one the exponents are
differences.
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


def chunkwise(x: Stream, state: Array, chunk: int, sub_chunk: int) -> tuple[Array, Array]:
    """The outputs (b, m, t, r, e), and the final state (b, m, d, e).

    The decay is one number per token, or one per key channel (the last axis of g is 1). There are
    as many queries as keys.
    """
    xp = namespace(x.k)
    s = x.k.shape[2]
    if x.g.shape[-1] > 1:
        raise ValueError("the chunkwise form has no gate for each value channel here")
    outputs = []
    for start in range(0, s, chunk):
        part = Stream(
            *(None if a is None else a[:, :, start : min(start + chunk, s), ...] for a in x)
        )
        o, state = _one_chunk(part, state, sub_chunk)
        outputs.append(o)
    return xp.concat(outputs, axis=2), state


def _one_chunk(x: Stream, state: Array, sub_chunk: int) -> tuple[Array, Array]:
    xp = namespace(x.k)
    total = xp.cumulative_sum(x.g[..., 0], axis=2)  # G, (b, m, C, 1 or d)
    from_start, to_end = xp.exp(total), xp.exp(total[:, :, -1:, :] - total)
    u = x.v
    if x.beta is not None:
        a, to_erased = erased(x), from_start
        if x.undecayed is None:
            among_keys = _scores(a[:, :, :, None, :], x.k, total, sub_chunk)[:, :, :, 0, :]
        else:
            rows, to_erased = next_token(a)[:, :, :, None, :], xp.exp(previous_token(total))
            among_keys = previous_token(_scores(rows, x.k, total, sub_chunk)[:, :, :, 0, :])
        below = x.beta[..., None] * xp.tril(among_keys, k=-1)
        residual = x.v - (to_erased * a) @ state
        u = solve_lower(identity_like(below) + below, x.beta[..., None] * residual)
    o = (from_start[:, :, :, None, :] * x.q) @ state[:, :, None, ...]
    o = o + _scores(x.q, x.k, total, sub_chunk) @ u[:, :, None, ...]
    decayed = xp.exp(total[:, :, -1, :])[..., None] * state
    return o, decayed + transpose(to_end * x.k) @ u


def _scores(q: Array, k: Array, total: Array, sub_chunk: int) -> Array:
    """tril(Σ_c q_ic k_jc e^{G_ic − G_jc}) of one chunk: (b, m, C, r, C)."""
    xp = namespace(q)
    size = k.shape[2]
    rows = []
    for start in range(0, size, sub_chunk):
        stop = min(start + sub_chunk, size)
        tokens = slice(start, stop)
        blocks = [_within(q[:, :, tokens, ...], k[:, :, tokens, :], total[:, :, tokens, :])]
        if start:
            anchor = total[:, :, start - 1 : start, :]
            to_query = xp.exp(total[:, :, tokens, :] - anchor)[:, :, :, None, :]
            from_key = xp.exp(anchor - total[:, :, :start, :]) * k[:, :, :start, :]
            scores = (to_query * q[:, :, tokens, ...]) @ transpose(from_key)[:, :, None, ...]
            blocks.insert(0, scores)
        if stop < size:
            zeros = xp.zeros_like(q[:, :, tokens, :, :1])
            blocks.append(xp.broadcast_to(zeros, (*zeros.shape[:-1], size - stop)))
        rows.append(xp.concat(blocks, axis=-1))
    return xp.concat(rows, axis=2)


def _within(q: Array, k: Array, total: Array) -> Array:
    """The scores within a sub-chunk, from the exponents of each pair of tokens and channel."""
    xp = namespace(q)
    token = arange_like(k.shape[2], k)
    visible = (token[None, :] <= token[:, None])[..., None]
    exponent = total[:, :, :, None, :] - total[:, :, None, :, :]
    decay = xp.exp(xp.where(visible, exponent, -math.inf))[:, :, :, None, ...]
    return xp.sum(q[..., None, :] * k[:, :, None, None, :, :] * decay, axis=-1)
