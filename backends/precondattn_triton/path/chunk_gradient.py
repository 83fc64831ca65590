"""PaTH's chunks backward: gradients of k, w and β from the gradients of the chunks' results.

With the factors of `chunks.py`, and F the gradient of P,

    K̃ = k − (Z R)ᵀ w:         dk += dK̃,    dw −= Z R dK̃,    d(Z R) −= w dK̃ᵀ
    P = I − wᵀ U:              dU −= w F,    dw −= U Fᵀ
    Z R and U = Z w:           dZ = d(Z R) Rᵀ + dU wᵀ,    dR = stril(Zᵀ d(Z R)),    dw += Zᵀ dU
    R = stril(w kᵀ):           dk += dRᵀ w,    dw += dR k
    Z = M diag(β):             dM = dZ diag(β),    dβ_j = Σ_i M_ij dZ_ij
    M = (I + diag(β) G)⁻¹:     dX = −Mᵀ dM Mᵀ,    dβ_i += Σ_j dX_ij G_ij
    G = stril(w wᵀ):           dG = stril(diag(β) dX),    dw += (dG + dGᵀ) w

with PyTorch's batched products of matrices C × d, one per chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from precondattn_triton.path.chunks import PathChunks
from precondattn_triton.tiles import KernelMasks


class ChunkGradients(NamedTuple):
    """The gradients of the chunks' results, from all queries."""

    k: Tensor
    w: Tensor
    u: Tensor
    zr: Tensor
    keys: Tensor
    """dK̃"""
    correction: Tensor
    """F (b n chunks, D, D)"""


def through_chunks(
    k: Tensor, beta: Tensor, chunks: PathChunks, masks: KernelMasks, d_chunks: ChunkGradients
) -> tuple[Tensor, Tensor, Tensor]:
    """dk and dw (b n, T, D), dβ (b n, T), of k (b, s, n, d) and β (b, s, n)."""
    size = chunks.size

    def each(rows: Tensor) -> Tensor:
        """(b n chunks, C, …), float32"""
        return rows.reshape(-1, size, *rows.shape[2:]).float()

    w, u, zr, m = (each(a) for a in (chunks.w, chunks.u, chunks.zr, chunks.inverse))
    k, beta = (each(_rows(a, chunks, masks)) for a in (k, beta[..., None]))
    k = torch.nn.functional.pad(k, (0, w.shape[2] - k.shape[2]))
    d_k, d_w, d_u, d_zr, d_keys = (each(a) for a in d_chunks[:5])

    d_k = d_k + d_keys
    d_zr = d_zr.baddbmm(w, d_keys.mT, alpha=-1)
    d_u = d_u.baddbmm(w, d_chunks.correction, alpha=-1)
    d_w = d_w.baddbmm(zr, d_keys, alpha=-1).baddbmm(u, d_chunks.correction.mT, alpha=-1)
    right = (w @ k.mT).tril(-1)
    d_z = (d_zr @ right.mT).baddbmm(d_u, w.mT)
    z = m * beta.mT
    d_right = (z.mT @ d_zr).tril(-1)
    d_k = d_k.baddbmm(d_right.mT, w)
    d_w = d_w.baddbmm(d_right, k).baddbmm(z.mT, d_u)
    d_system = -(m.mT @ (d_z * beta.mT) @ m.mT)
    overlap = (w @ w.mT).tril(-1)
    d_beta = (m * d_z).sum(-2) + (d_system * overlap).sum(-1)
    d_overlap = (beta * d_system).tril(-1)
    d_w = d_w.baddbmm(d_overlap + d_overlap.mT, w)
    shape = d_chunks.k.shape
    return d_k.view(shape), d_w.view(shape), d_beta.view(shape[:2])


def _rows(a: Tensor, chunks: PathChunks, masks: KernelMasks) -> Tensor:
    """Tokens (b, s, n, …) in the layout of chunks (b n, T, …); 0 for invalid tokens."""
    b, s, n, c = a.shape
    if masks.k_valid is not None:
        a = a.where(masks.k_valid.bool()[:, :, None, None], 0)
    a = torch.nn.functional.pad(a.transpose(1, 2), (0, 0, 0, chunks.size * chunks.number - s))
    return a.reshape(b * n, -1, c)


def tokens_of(rows: Tensor, like: Tensor) -> Tensor:
    """Rows in the layout of chunks (b n, T, …) as an array (b, s, n, …) like an input."""
    b, s, n = like.shape[:3]
    each = rows.unflatten(0, (b, n))[:, :, :s].transpose(1, 2)
    return (each[..., : like.shape[3]] if like.ndim == 4 else each).to(like.dtype)
