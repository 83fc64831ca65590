"""LUCID as in its paper, in PyTorch: dense T × T matrices and one triangular solve.

    P = exp(RN(K) RN(K)ᵀ / √d − √d) below the diagonal, 1 on it
    Y = solve_triangular(P, V)
    O = softmax(Q Kᵀ / √d + mask) Y

A user who implements Eq. 2 of LUCID directly gets this, so it is a peer to compare with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from precondattn.arrays import Array


def naive_lucid(q: Array, k: Array, v: Array) -> Array:
    """The output (b, t, h, e), of q (b, t, h, d), k (b, t, n, d) and v (b, t, n, e)."""
    import torch

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5
    unit = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + 1e-6)
    correlation = torch.exp(scale * unit @ unit.mT - 1 / scale).tril(-1)
    y = torch.linalg.solve_triangular(correlation, v, upper=False, unitriangular=True)
    group = q.shape[1] // k.shape[1]
    k, y = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, y))
    t = q.shape[2]
    is_future = torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1)
    scores = (scale * q @ k.mT).masked_fill(is_future, -torch.inf)
    return (scores.softmax(-1) @ y).transpose(1, 2)
