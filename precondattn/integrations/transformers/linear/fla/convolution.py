"""Short causal convolutions with the arguments of flash-linear-attention's functions.

    y_t = act(b + Σ_i w_i x_{t − W + 1 + i}),    i = 0 … W − 1, for each channel

A state is the last W inputs (n, channels, W); before the first token they are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

from precondattn.given import Given
from precondattn.integrations.transformers.linear.fla.ragged import as_batch, as_row, valid_slots


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
    cp_context: None = None,
    **others: Given,
) -> tuple[Tensor, Tensor | None]:
    """y (b, t, channels) as x, and the state if it is wanted; weight (channels, W)."""
    if cp_context is not None:
        raise ValueError("cp_context: sequences spread over devices are not supported on a CPU")
    valid = None if cu_seqlens is None else valid_slots(cu_seqlens)
    rows = x
    if cu_seqlens is not None and valid is not None:
        rows = as_batch(x, cu_seqlens, valid)
    width = weight.shape[1]
    before = rows.new_zeros(rows.shape[0], rows.shape[2], width)
    if initial_state is not None:
        before = initial_state.to(rows.dtype)
    whole = torch.cat([before, rows.mT], 2)
    y = _activated(
        conv1d(whole[..., 1:], weight[:, None], bias, groups=weight.shape[0]), activation
    )
    y = y.mT if valid is None else as_row(y.mT, valid, x.shape[1])
    after = None
    if output_final_state:
        lengths = rows.shape[1] if valid is None else valid.sum(1)[:, None]
        last = torch.arange(width, device=x.device) + lengths
        after = whole.gather(2, last.expand(rows.shape[0], width)[:, None].expand_as(before))
    return (y if residual is None else y + residual), after


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """y, of the shape of x, for one token of each sequence; the state is written in place."""
    assert weight is not None
    token = x.reshape(-1, x.shape[-1])
    cache.copy_(torch.cat([cache[..., 1:], token[..., None].to(cache.dtype)], 2))
    y = (cache.float() * weight.float()).sum(2)
    if bias is not None:
        y = y + bias.float()
    y = _activated(y, activation).to(x.dtype).reshape(x.shape)
    return (y if residual is None else y + residual), cache


def _activated(y: Tensor, activation: str | None) -> Tensor:
    return y if activation is None else silu(y)
