"""Sequences of several lengths: packed in one row, and as rows of a padded batch.

flash-linear-attention removes padding: its layers compute with x (1, total, …), where the sequence
n has the tokens from `cu_seqlens[n]` to `cu_seqlens[n + 1]`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def valid_slots(cu_seqlens: Tensor) -> Tensor:
    """Which slots (n, longest) of a batch of these sequences have a token."""
    lengths = cu_seqlens.diff()
    longest = int(lengths.max())
    return torch.arange(longest, device=cu_seqlens.device) < lengths[:, None]


def as_batch(x: Tensor, cu_seqlens: Tensor, valid: Tensor) -> Tensor:
    """x (1, total, …) as a batch (n, longest, …), with zeros where there is no token."""
    slots = torch.arange(valid.shape[1], device=x.device)
    index = (cu_seqlens[:-1, None] + slots).clamp(max=x.shape[1] - 1)
    outside = ~valid.reshape(*valid.shape, *[1] * (x.ndim - 2))
    return x[0][index].masked_fill(outside, 0)


def as_row(x: Tensor, valid: Tensor, total: int) -> Tensor:
    """The reverse of `as_batch`: (1, total, …), with zeros after the last sequence."""
    row = x[valid]
    padding = row.new_zeros(total - row.shape[0], *row.shape[1:])
    return torch.cat([row, padding])[None]
