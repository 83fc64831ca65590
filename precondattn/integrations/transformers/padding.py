"""Padding in a cache: the new columns of a mask, and a check of the other columns."""

from __future__ import annotations

import torch
from torch import Tensor

from precondattn.cache import KEY_MASK, Cache
from precondattn.cache.kinds import TOKENS
from precondattn.cache.windows import FIRST


def new_columns(key_mask: Tensor, cached: Tensor | int, new: int) -> Tensor:
    """The columns (b, t) of the new tokens in a mask of all slots, or of the new ones alone."""
    if key_mask.shape[1] == new:
        return key_mask
    if isinstance(cached, int):
        return key_mask[:, cached : cached + new]
    return key_mask.index_select(1, torch.arange(new, device=key_mask.device) + cached)


def check_cached_mask(cache: Cache, key_mask: Tensor | None, cached: int, new: int) -> None:
    """Raise an error if the mask of cached tokens differs from the stored mask."""
    if cached == 0 or (key_mask is not None and key_mask.shape[1] == new):
        return
    if key_mask is not None and key_mask.shape[1] < cached + new:
        raise ValueError(
            f"attention_mask: {cached} tokens in the cache and {new} new ones need as many columns"
            f"; found {key_mask.shape[1]}"
        )
    start = int(cache.store[FIRST][0]) if FIRST in cache.store else 0
    stored = cache.store[KEY_MASK][:, : cached - start] if KEY_MASK in cache.store else None
    now = None if key_mask is None else key_mask[:, start:cached]
    if stored is not None and now is not None:
        is_same = torch.equal(stored, now)
    else:
        one = stored if now is None else now
        is_same = one is None or bool(one.all())
    if not is_same:
        raise ValueError(
            "attention_mask: tokens in the cache are masked otherwise than when they were stored, "
            "and what is stored depends on it; pass the same mask with columns for the new tokens "
            "appended"
        )


def with_key_mask(cache: Cache) -> Cache:
    """The cache with a buffer of masks, true for the tokens so far."""
    capacity = cache.capacity
    if KEY_MASK in cache.store or capacity is None:
        return cache
    slots = torch.arange(capacity, device=cache.length.device)
    store = {**cache.store, KEY_MASK: slots[None, :] < cache.length[:, None]}
    return Cache(cache.length, store, {**cache.kinds, KEY_MASK: {TOKENS: ()}})
