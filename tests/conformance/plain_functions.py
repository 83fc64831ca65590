"""Functions of PyTorch arrays, as the author of a kernel has them, some with other conventions.

Arrays are (batch, time, heads, width), unless a name says otherwise.
"""

import torch

from precondattn_conformance import check


def checked(function, mechanism, *checks, **options):
    return check(function, mechanism, checks=checks, progress=False, **options)


def weights_of(scores):
    return scores.softmax(-1)


def attend(
    q, k, v, key_mask=None, segment_ids=None, *,
    tiled=False, top_left=False, hidden=None, weights=weights_of,
):  # fmt: skip
    """Softmax attention with options for other common conventions."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat(1, 1, group, 1) if tiled else x.repeat_interleave(group, 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    t, s = q.shape[2], k.shape[2]
    visible = torch.ones(t, s, dtype=torch.bool).tril(0 if top_left else s - t)[None, None]
    if key_mask is not None:
        visible = visible & key_mask[:, None, None, :]
    if segment_ids is not None:
        visible = visible & (segment_ids[:, None, s - t :, None] == segment_ids[:, None, None])
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if hidden is not None:
        return (weights(hidden(scores, visible)) @ v).transpose(1, 2)
    empty = ~visible.any(-1, keepdim=True)
    p = weights(scores.masked_fill(~visible & ~empty, -torch.inf)).masked_fill(empty, 0.0)
    v = v.masked_fill(~visible.any(-2)[..., None], 0)  # A NaN in padding must not count as a value.
    return (p @ v).transpose(1, 2)


def plain(q, k, v):
    return attend(q, k, v)


def heads_first(q, k, v):
    return attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def normalised(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def lucid(q, k, v):
    keys, values = (x.transpose(1, 2) for x in (k, v))
    unit = normalised(keys)
    overlap = torch.exp((unit @ unit.mT - k.shape[-1]) * k.shape[-1] ** -0.5)
    y = torch.linalg.solve_triangular(overlap.tril(), values, upper=False, unitriangular=True)
    return attend(q, k, y.transpose(1, 2))


def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
    """KDA as a recurrence, token by token, with the parameters of flash-linear-attention."""
    q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta))
    d = q.shape[-1]
    state = q.new_zeros(*k.shape[:2], d, v.shape[-1]) if initial_state is None else initial_state
    outs = []
    for t in range(q.shape[2]):
        state = state * g[:, :, t, :, None].exp()
        error = v[:, :, t] - torch.einsum("bhde,bhd->bhe", state, k[:, :, t])
        error = error * beta[:, :, t, None]
        state = state + k[:, :, t, :, None] * error[:, :, None, :]
        outs.append(torch.einsum("bhde,bhd->bhe", state, q[:, :, t]))
    out = torch.stack(outs, 1) * (d**-0.5 if scale is None else scale)
    return (out, state) if output_final_state else (out, None)


def gated_by_differences(hide):
    """A gated state in one block, with the decay from j to i as exp(G_i - G_j)."""

    def ssd(q, k, v, g):
        q, k = (x.repeat_interleave(g.shape[2] // x.shape[2], 2) for x in (q, k))
        v = v.repeat_interleave(g.shape[2] // v.shape[2], 2)
        sums = g.cumsum(1).transpose(1, 2)
        later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
        weights = torch.einsum("bthd,bshd->bhts", q, k)
        return torch.einsum(
            "bhts,bshe->bthe", hide(weights, sums[..., None] - sums[..., None, :], later), v
        )

    return ssd
