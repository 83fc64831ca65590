"""Sampling the next token from logits: the most probable one, or by temperature and top-p."""

from __future__ import annotations

import torch
from torch import Tensor


def chosen(
    logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None
) -> Tensor:
    """One token (b,) for each row of logits (b, vocabulary)."""
    if temperature == 0:
        return logits.argmax(-1)
    p, order = torch.sort((logits.float() / temperature).softmax(-1), descending=True)
    before = p.cumsum(-1) - p
    p = p.masked_fill(before >= top_p, 0)
    return order.gather(-1, torch.multinomial(p, 1, generator=generator))[:, 0]
