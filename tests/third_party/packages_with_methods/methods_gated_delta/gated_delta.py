"""The gated delta rule in PyTorch. Replace `forward` and `backward` with your kernels.

    S' = e^g S,    r = v − S'ᵀ k,    S_new = S' + β k rᵀ,    o = scale · S_newᵀ q

The recurrence loops over tokens. The gradient loops from the last token to the first. With
dS the gradient of S_new, from the output and from later tokens,

    dβ = kᵀ dS r,    dr = β dSᵀ k,    dS' = dS − k drᵀ,    dk = β dS r − S' dr,    dv = dr,

dg = ⟨dS', S'⟩, and e^g dS' is the gradient of S. It needs the state before each token, and
runs the recurrence again to get them.
Half precision is computed in float32.
"""

import torch as xp


def forward(q, k, v, g, beta, scale, state=None):
    """The output (b, t, u, e), and the state (b, u, d, e) after the last token.

    q and k are (b, t, h, d), v is (b, t, u, e), g and beta are (b, t, u): each head of q
    and k serves u / h heads of v. `state` is the state before the first token; None is 0.

    If heads of q share a state, as in other recurrences, each is computed with a copy.
    """
    rows = _rows(q, k, v, g, beta)
    copies = rows[0].shape[2] // v.shape[2]
    state = _empty(rows) if state is None else _repeated(state, copies, 1)
    outs = []
    for row in zip(*rows, strict=True):
        state, out = _token(state, *row, scale)
        outs.append(out)
    outs = xp.stack(outs)
    return _as(v, outs.swapaxes(0, 1)), state[:, ::copies]


def backward(q, k, v, g, beta, scale, state, d_out, d_state):
    """The gradients of q, k, v, g, beta and of `state`.

    `d_out` and `d_state` are the gradients of the output and of the last state; `state`
    and `d_state` are 0 if None.
    """
    rows = _rows(q, k, v, g, beta)
    copies = rows[0].shape[2] // v.shape[2]
    d_outs = _time_first(d_out, d_out.shape[2])
    state = _empty(rows) if state is None else _repeated(state, copies, 1)
    d_state = (
        _empty(rows) if d_state is None else _repeated(d_state, copies, 1) / copies
    )
    states = []
    for row in zip(*rows, strict=True):
        states.append(state)
        state, _ = _token(state, *row, scale)
    d_rows = []
    for row in reversed(list(zip(states, *rows, d_outs, strict=True))):
        d_state, d_row = _token_vjp(d_state, *row, scale)
        d_rows.insert(0, d_row)
    d_rows = [xp.stack(each) for each in zip(*d_rows, strict=True)]
    inputs = (q, k, v, g, beta)
    gradients = [
        _as(x, _summed(d_x.swapaxes(0, 1), x.shape[2]))
        for x, d_x in zip(inputs, d_rows, strict=True)
    ]
    return *gradients, _summed(d_state[:, None], v.shape[2])[:, 0]


def _token(state, q, k, v, g, beta, scale):
    """The state after one token, and the output of its query."""
    kept = xp.exp(g)[..., None, None] * state
    rest = v - _read(kept, k)
    state = kept + _outer(beta[..., None] * k, rest)
    return state, scale * _read(state, q)


def _token_vjp(d_state, state, q, k, v, g, beta, d_out, scale):
    """The gradients of the state before one token, and of its inputs."""
    kept = xp.exp(g)[..., None, None] * state
    rest = v - _read(kept, k)
    d_q = scale * _written(kept + _outer(beta[..., None] * k, rest), d_out)
    d_state = d_state + scale * _outer(q, d_out)
    d_k = _written(d_state, rest)
    d_beta = (k * d_k).sum(-1)
    d_rest = beta[..., None] * _read(d_state, k)
    d_k = beta[..., None] * d_k - _written(kept, d_rest)
    d_kept = d_state - _outer(k, d_rest)
    d_g = (d_kept * kept).sum((-2, -1))
    return xp.exp(g)[..., None, None] * d_kept, (d_q, d_k, d_rest, d_g, d_beta)


def _read(state, row):
    """Sᵀ x, for each head."""
    return xp.einsum("bude,bud->bue", state, row)


def _written(state, row):
    """S x, for each head."""
    return xp.einsum("bude,bue->bud", state, row)


def _outer(k, v):
    return k[..., None] * v[..., None, :]


def _rows(q, k, v, g, beta):
    heads = max(q.shape[2], v.shape[2])
    return tuple(_time_first(x, heads) for x in (q, k, v, g, beta))


def _empty(rows):
    """The state before the first token."""
    _, k, v, *_ = rows
    return xp.zeros_like(_outer(k[0], v[0]))


def _time_first(x, heads):
    """(b, t, n, …) as (t, b, heads, …), in float32 or wider."""
    x = x.to(xp.promote_types(x.dtype, xp.float32))
    return _repeated(x, heads // x.shape[2], 2).swapaxes(0, 1)


def _repeated(x, times, axis):
    """Every entry of an axis, repeated several times."""
    return x.repeat_interleave(times, axis)


def _summed(x, heads):
    """Sums over groups of heads of (b, t, u, …), which leave `heads` heads."""
    b, t, u, *rest = x.shape
    return x.reshape(b, t, heads, u // heads, *rest).sum(3)


def _as(like, x):
    """x in the dtype of another array."""
    return x.to(like.dtype)
