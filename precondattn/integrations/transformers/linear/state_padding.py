"""Padding that a state has read, which Transformers' caches of linear layers do not undo.

A layer sets the rows of padding to 0, but its state decays over them, and the rows before its next
convolution are those of padding. Before the first token of a sequence this changes nothing. After a
token it does, for every token that follows: a prefill that ends in padding has right logits, and
each later one is wrong. A layer gets the mask of a call with several tokens, and none with a single
token. So the cache of a layer keeps what its sequences have read, as long as that matters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

NAME = "precondattn_padding"
"""The attribute of a layer's cache."""


class Padding(NamedTuple):
    """What the sequences (b,) of a cache have read."""

    has_tokens: Tensor
    """Whether there was a token that is no padding."""
    is_after: Tensor
    """Whether there was padding after such a token."""


def checked(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a linear layer, which refuses tokens that come after padding."""

    def forward_checked(
        self: Any,
        hidden_states: Tensor,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        # Compiled code does not see numbers.
        if cache_params is not None and not torch.compiler.is_compiling():
            _check(cache_params.layers[self.layer_idx], hidden_states, attention_mask)
        return forward(self, hidden_states, cache_params, attention_mask, **kwargs)

    return forward_checked


def _check(layer: Any, x: Tensor, mask: Tensor | None) -> None:
    before: Padding | None = getattr(layer, NAME, None)
    if before is None and mask is None:
        return
    none = torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
    if not _is_filled(layer):  # It is new, or was emptied.
        before = None
    elif before is None:
        before = Padding(~none, none)
    if before is not None and before.has_tokens.shape[0] != x.shape[0]:
        # Sequences were selected since, unknown which.
        before = Padding(before.has_tokens.all()[None], before.is_after.any()[None])
    after = _after(before or Padding(none, none), before is None, x, mask)
    is_done = bool(after.has_tokens.all()) and not bool(after.is_after.any())
    setattr(layer, NAME, None if is_done else after)


def _after(before: Padding, is_first: bool, x: Tensor, mask: Tensor | None) -> Padding:
    """What has been read with these tokens.

    Raises
    ------
    ValueError
        for a token after padding that follows a token, and for a single token of a sequence that
        has only had padding, which may be padding too.
    """
    if not is_first and x.shape[1] == 1 and not before.has_tokens.all():
        raise ValueError(
            "attention_mask: a sequence has only had padding, and Transformers does not tell a "
            "linear layer whether a single token is padding; give its first token together with "
            "one before or after it"
        )
    is_token = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    if mask is not None:
        is_token = mask.bool()
    follows = (is_token.cumsum(1) > 0) | before.has_tokens[:, None]
    is_after = ((~is_token & follows).cumsum(1) > 0) | before.is_after[:, None]
    if (is_token & is_after).any():
        raise ValueError(
            "attention_mask: a token follows padding that is not at the left of its sequence, and "
            "the state of a linear layer in Transformers' cache has read that padding; pad prompts "
            "at the left"
        )
    return Padding(follows[:, -1], is_after[:, -1])


def _is_filled(layer: Any) -> bool:
    """Whether a layer's cache has a state."""
    filled = getattr(layer, "has_previous_state", False)
    return any(filled.values()) if isinstance(filled, dict) else bool(filled)
