"""Refusing tokens after padding, for which Transformers' caches of linear layers are wrong.

A layer sets the rows of padding to 0, but its state decays over them, and the rows before its next
convolution are those of padding. Before the first token of a sequence this changes nothing. After a
token it does, for every token that follows: a prefill that ends in padding has right logits, and
each later one is wrong. A layer gets the mask of a call with several tokens, and none with a single
token. So the cache of a layer keeps what its sequences have read.

Compiled code can not raise for what tensors contain. There the device asserts it, and no call waits
for the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from precondattn.arrays import Tree
from precondattn.given import Given
from precondattn.integrations.transformers.checked_calls import require
from precondattn.integrations.transformers.linear.computed import Forward

NAME = "precondattn_padding"
"""The attribute of a layer's cache with the record."""

AFTER = (
    "attention_mask: a token follows padding that is not at the left of its sequence, and the "
    "state of a linear layer in Transformers' cache has read that padding; pad prompts at the left"
)


@dataclass
class Padding:
    """The record of what the sequences (b,) of a cache have read."""

    has_tokens: Tensor
    """Whether a sequence had a token that is not padding."""
    is_after: Tensor
    """Whether a sequence had padding after such a token."""
    is_harmless: bool
    """Whether all sequences have tokens and none has padding after them; False if compiled."""

    def write(self, has_tokens: Tensor, is_after: Tensor) -> None:
        """Write new entries in place, where a CUDA graph reads them."""
        self.has_tokens.copy_(has_tokens)
        self.is_after.copy_(is_after)
        self.is_harmless = not _is_compiled() and bool((has_tokens & ~is_after).all())


def checked(forward: Forward) -> Forward:
    """The forward of a linear layer, which refuses tokens that come after padding."""

    def forward_checked(
        self: nn.Module,
        hidden_states: Tensor,
        cache_params: Given = None,
        attention_mask: Tensor | None = None,
        **kwargs: Given,
    ) -> Tree:
        if cache_params is not None:
            _check(cache_params.layers[self.layer_idx], hidden_states, attention_mask)
        return forward(self, hidden_states, cache_params, attention_mask, **kwargs)

    return forward_checked


def _check(layer: nn.Module, x: Tensor, mask: Tensor | None) -> None:
    """Check the tokens x (b, t, width) and note what is read with them.

    Raises
    ------
    ValueError
        for a token after padding that follows a token. A RuntimeError in compiled code.
    """
    is_first = not _is_filled(layer)  # It is new, or was emptied.
    padding: Padding | None = getattr(layer, NAME, None)
    if mask is None and is_first:
        setattr(layer, NAME, None if _is_compiled() else _noted(x, has_tokens=True))
    if mask is None and (is_first or padding is None or padding.is_harmless):
        return
    if is_first or padding is None:
        padding = _noted(x, has_tokens=not is_first)
    elif padding.has_tokens.shape[0] != x.shape[0]:
        # Sequences were selected since, unknown which.
        selected, padding = padding, _noted(x, has_tokens=True)
        padding.write(selected.has_tokens.all(), selected.is_after.any())
    setattr(layer, NAME, padding)
    is_token = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    if mask is not None:
        is_token = mask.bool()
    follows = (is_token.cumsum(1) > 0) | padding.has_tokens[:, None]
    is_after = ((~is_token & follows).cumsum(1) > 0) | padding.is_after[:, None]
    require(~(is_token & is_after).any(), AFTER)
    padding.write(follows[:, -1], is_after[:, -1])


def _noted(x: Tensor, *, has_tokens: bool) -> Padding:
    """The record for sequences x (b, t, width) that have had only tokens, or nothing."""
    both = torch.full((x.shape[0],), has_tokens, device=x.device), x.new_zeros(x.shape[0]).bool()
    if not _is_compiled():
        for tensor in both:
            torch._dynamo.mark_static_address(tensor)  # As Transformers does with states.
    return Padding(*both, is_harmless=has_tokens)


def _is_compiled() -> bool:
    return bool(torch.compiler.is_compiling())


def _is_filled(layer: nn.Module) -> bool:
    """Whether a layer's cache has a state."""
    filled = getattr(layer, "has_previous_state", False)
    return any(filled.values()) if isinstance(filled, dict) else bool(filled)
