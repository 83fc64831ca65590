"""LUCID's triangular system in PyTorch. Replace the two functions with your kernels.

    y_i = v_i − Σ_{j<i} Φ_ij y_j,    Φ_ij = exp(scale · (⟨u_i, u_j⟩ − d)),    u = k / rms(k)

The solve loops over blocks of tokens. For the rows I of a block, with the y of earlier
blocks known,

    y_I = (I + stril Φ_II)⁻¹ (v_I − Σ_{J<I} Φ_IJ y_J).

The gradient loops from the last block to the first, starting with r = dy:

    dv_I = (I + stril Φ_II)⁻ᵀ r_I,    r_J −= Φ_IJᵀ dv_I  (J < I),    dS = −(dv yᵀ) ∘ Φ,

and dS, the gradient of the exponents, is applied to the keys with the current row block
of Φ. Only one row block of Φ is in memory at a time.
Half precision is computed in float32.
"""

import torch
from torch.linalg import solve_triangular

BLOCK = 16


def forward(k, v, scale, eps):
    """y (b, s, n, e), from keys k (b, s, n, d) and values v (b, s, n, e)."""
    u, _ = _normalised(_heads_first(k), eps)
    values = _heads_first(v)
    y = torch.empty_like(values)
    for start, stop in _blocks(k.shape[1]):
        rows = slice(start, stop)
        phi = _row_block(u, scale, start, stop)
        rest = values[:, :, rows] - phi[..., :start] @ y[:, :, :start]
        y[:, :, rows] = solve_triangular(
            phi[..., start:], rest, upper=False, unitriangular=True
        )
    return y.transpose(1, 2).to(v.dtype)


def backward(k, y, d_y, scale, eps):
    """The gradients of k and v, from y and its gradient."""
    u, rms = _normalised(_heads_first(k), eps)
    y, rest = _heads_first(y), _heads_first(d_y).clone()
    d_v, d_u = torch.empty_like(rest), torch.zeros_like(u)
    for start, stop in reversed(_blocks(k.shape[1])):
        rows = slice(start, stop)
        phi = _row_block(u, scale, start, stop)
        d_v[:, :, rows] = solve_triangular(
            phi[..., start:].mT, rest[:, :, rows], upper=True, unitriangular=True
        )
        rest[:, :, :start] -= phi[..., :start].mT @ d_v[:, :, rows]
        d_scores = -scale * (d_v[:, :, rows] @ y[:, :, :stop].mT) * phi
        d_u[:, :, rows] += d_scores @ u[:, :, :stop]
        d_u[:, :, :stop] += d_scores.mT @ u[:, :, rows]
    d_k = (d_u - u * (u * d_u).mean(-1, keepdim=True)) / rms
    return d_k.transpose(1, 2).to(k.dtype), d_v.transpose(1, 2).to(k.dtype)


def _row_block(u, scale, start, stop):
    """Φ of a block's rows and all keys up to its end, 0 on and above the diagonal."""
    scores = u[:, :, start:stop] @ u[:, :, :stop].mT
    return torch.exp(scale * (scores - u.shape[-1])).tril(start - 1)


def _normalised(k, eps):
    """u = k / rms(k), and rms(k)."""
    rms = (k.square().mean(-1, keepdim=True) + eps).sqrt()
    return k / rms, rms


def _heads_first(x):
    """(b, s, n, …) as (b, n, s, …), in float32 or wider."""
    return x.transpose(1, 2).to(torch.promote_types(x.dtype, torch.float32))


def _blocks(count):
    """The first token of every block, and the token after its last."""
    return [(start, min(start + BLOCK, count)) for start in range(0, count, BLOCK)]
