"""Checks of the arguments of a model's call, and the mask of the new tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from precondattn.given import Given
from precondattn.integrations.transformers.cache import PREFIX_TUNING
from precondattn.integrations.transformers.masks import check_numbers, check_own_pattern
from precondattn.integrations.transformers.model.cache import PrecondattnCache

RECORDED = ("output_hidden_states",)
"""The arguments that Transformers' own decorators read."""
WITHOUT_EFFECT = ("output_attentions", "is_causal", "debug_io")
LOSS = ("num_items_in_batch", "ignore_index", "shift_labels")
"""The arguments of Transformers' loss function."""


def check_arguments(arguments: Mapping[str, Given], allowed: tuple[str, ...]) -> None:
    """Raise an error for arguments that would have no effect."""
    if arguments.get("output_attentions"):
        raise ValueError(
            "output_attentions: the weights of attention are never computed; found True"
        )
    if arguments.get("is_causal", True) is not True:
        raise ValueError(f"is_causal: the model is causal; found {arguments['is_causal']!r}")
    unknown = [
        name
        for name, value in arguments.items()
        if value is not None and name not in (*RECORDED, *WITHOUT_EFFECT, *allowed)
    ]
    if unknown:
        raise TypeError(f"{unknown[0]} is no argument of this model")


def check_cache(cache: Given, layers: int) -> None:
    """Raise an error unless the cache is one of this model."""
    if cache is None:
        return
    if not isinstance(cache, PrecondattnCache):
        raise TypeError(
            f"past_key_values must be a PrecondattnCache, from PrecondattnCache(model.config) or "
            f"an earlier call; found {type(cache).__name__} ({PREFIX_TUNING})"
        )
    if len(cache.layers) != layers:
        raise ValueError(
            f"past_key_values has {len(cache.layers)} layers, and the model has {layers}"
        )


def mask_of_new(attention_mask: Given, batch: int, count: int, cache: Given) -> Tensor | None:
    """True for the valid new tokens (b, count); None if all are. The cache remembers it."""
    past = 0 if cache is None else cache.get_seq_length()
    valid = None
    if attention_mask is not None:
        _check_mask(attention_mask, batch, count, past)
        valid = attention_mask != 0
        if not torch.compiler.is_compiling() and valid.all():
            valid = None
    if cache is not None:
        if valid is None and cache.valid is not None:
            new = cache.valid.new_ones(batch, count)
            cache.valid = torch.cat([cache.valid, new], 1)
        else:
            cache.valid = valid
    if valid is None:
        return None
    new = valid[:, past:]
    # Padding of the prompt only: the new tokens of every step are valid.
    return None if not torch.compiler.is_compiling() and new.all() else new


def pairs_of_new(
    attention_mask: Given, batch: int, count: int, cache: Given, layers: nn.ModuleList
) -> Tensor | None:
    """The mask of pairs (b or 1, heads or 1, t, cached + t); None if there is only padding."""
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 4:
        return None
    if attention_mask.dtype != torch.bool:
        raise TypeError(
            f"attention_mask: a mask of pairs must be boolean, True where a token may attend to "
            f"another; found {attention_mask.dtype}"
        )
    past = 0 if cache is None else cache.get_seq_length()
    if attention_mask.shape[0] not in (1, batch) or attention_mask.shape[2:] != (
        count,
        past + count,
    ):
        raise ValueError(
            f"attention_mask: a mask of pairs must have shape ({batch} or 1, heads or 1, {count}, "
            f"{past + count}), a column for each of the {past} cached and {count} new tokens; "
            f"found {tuple(attention_mask.shape)}"
        )
    if cache is not None and cache.valid is not None:
        raise ValueError(
            "attention_mask: a mask of pairs can not follow padding in the cache, which it has no "
            "columns for"
        )
    for block in layers:
        check_own_pattern(attention_mask, block.attention.mechanism, past)
    return attention_mask


def check_positions(positions: Given, mask: Given, cache: Given) -> None:
    """Raise an error for several texts in one row, whose positions start again."""
    if positions is None or mask is not None or torch.compiler.is_compiling():
        return
    if positions.ndim != 2:
        raise ValueError(f"position_ids must have shape (b, t); found {tuple(positions.shape)}")
    if (positions.diff(dim=1) < 1).any():
        raise ValueError(
            "position_ids: they must increase; several texts packed into one row are not "
            "supported, pad them instead"
        )


def _check_mask(mask: Given, batch: int, count: int, past: int) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor; found {type(mask).__name__}")
    if tuple(mask.shape) != (batch, past + count):
        raise ValueError(
            f"attention_mask must have shape {(batch, past + count)}, a column for each of the "
            f"{past} cached and {count} new tokens; found {tuple(mask.shape)}"
        )
    check_numbers(mask)
