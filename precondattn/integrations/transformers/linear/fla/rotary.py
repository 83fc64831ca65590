"""Rotary positions with the arguments of flash-linear-attention's function.

    (x₁, x₂) → (x₁ cos − x₂ sin,  x₁ sin + x₂ cos)

for the two halves of the first channels, or for pairs side by side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from precondattn.integrations.transformers.linear.fla.ragged import as_row, valid_slots


def rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """x (b, t, h, d) turned by the angles of its positions; cos and sin (positions, channels/2)."""
    valid = None if cu_seqlens is None else valid_slots(cu_seqlens)
    slots = torch.arange(x.shape[1] if valid is None else valid.shape[1], device=x.device)
    offsets = seqlen_offsets[:, None] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
    positions = (slots + offsets).expand(x.shape[0] if valid is None else valid.shape[0], -1)
    if valid is not None:
        positions = as_row(positions, valid, x.shape[1])
    c, s = (table[positions].float()[:, :, None] for table in (cos, sin))
    turned, rest = x[..., : 2 * c.shape[-1]].float(), x[..., 2 * c.shape[-1] :]
    pairs = turned.unflatten(-1, (-1, 2)).mT if interleaved else turned.unflatten(-1, (2, -1))
    first, second = pairs.unbind(-2)
    pairs = torch.stack([first * c - second * s, first * s + second * c], -2)
    turned = (pairs.mT if interleaved else pairs).flatten(-2)
    out = torch.cat([turned.to(x.dtype), rest], -1)
    return x.copy_(out) if inplace else out
