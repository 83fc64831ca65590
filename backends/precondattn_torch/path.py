"""PaTH's softmax, with PyTorch's fused kernel for the keys before a row block.

Queries and preceding keys are transported to the start of the row block
(`precondattn_portable/transported.py`). There the scores are plain dot products, and all these keys
are visible. Keys within the row block are read by `precondattn_portable`. The two means are merged
by their log-sum-exps λ:

    λ = log(e^{λ₁} + e^{λ₂}),    o = e^{λ₁ − λ} o₁ + e^{λ₂ − λ} o₂.
"""

from __future__ import annotations

import torch
from torch import Tensor

from precondattn_portable.attention import AttentionBlocks, AttentionView, HeadGroup
from precondattn_portable.layout import Tile
from precondattn_portable.masks import Mask
from precondattn_portable.transported import TransportedScores


class PathAttention(AttentionBlocks):
    """Algorithm of `Path` whose output is the weighted mean of the values."""

    name = "row blocks, the keys before them by PyTorch's kernel"

    def keys_of_row_block(self, view: AttentionView, mask: Mask, size: int) -> int:
        return size if _fits(view, mask) else super().keys_of_row_block(view, mask, size)

    def read(self, group: HeadGroup, tile: Tile) -> tuple[Tensor, Tensor]:
        i0 = tile.i0
        if not (0 < i0 < tile.high and _fits(group.view, group.mask)):
            return super().read(group, tile)
        assert isinstance(group.scores, TransportedScores)
        own_tile = tile._replace(low=i0)
        own_out, own_log = group.read.forward(group.row_block(own_tile), own_tile)
        queries, keys = group.scores.carried_to(tile)
        past, past_log = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, group.view.v[:, :, :i0, :], scale=1.0
        )
        past_log = past_log.to(own_log.dtype).unsqueeze(-1)
        log_total = torch.logaddexp(own_log, past_log)
        own_out = own_out.mul_((own_log - log_total).exp_())
        return own_out.addcmul_(past, (past_log - log_total).exp_()), log_total


def _fits(view: AttentionView, mask: Mask) -> bool:
    """Whether every key before a row block is visible, and the kernel supports the call."""
    plain = mask.window is None and mask.frame.k_valid is None and mask.frame.k_segment is None
    is_alone = view.g is None and view.bias is None
    return plain and is_alone and view.v.device.type == "cpu" and view.v.shape == view.k.shape
