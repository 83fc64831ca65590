"""Layers of a Transformers cache that contain a `precondattn.Cache`.

Transformers calls `update(k, v)` before attention. Here it only returns the new tokens. The
attention function then calls `extend`, which also gets q, and stores what the mechanism needs.

Every slot is a token or padding, as in Transformers' own layers. The buffer `key_mask` masks
padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from precondattn.cache import KEY_MASK, Cache
from precondattn.cache.kinds import TOKENS
from precondattn.cache.windows import FIRST
from precondattn.given import Given

ANY = 2**30
"""A capacity above every window, so that a mechanism with a window has the cache of a window."""

NOT_OFFLOADED = (
    "past_key_values: an offloaded cache moves copies of keys and values between devices, and a "
    "mechanism's cache has other buffers; use one without offloading"
)

PREFIX_TUNING = "PEFT's prefix tuning can not be used here; its prompt tuning and P-tuning can"


class CacheLayer(CacheLayerMixin):
    """The base class of the layers here."""

    supports_early_init = False
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.cache: Cache | None = None
        """The cache of the mechanism; None before the first tokens."""
        self.first_layer: CacheLayer | None = None
        """The first layer of the model's cache, which a call extends before this one."""

    def check_first(self, cached: int, new: int) -> None:
        """Raise an error unless the first layer had equally many tokens before these new ones."""
        if self.first_layer is not None and int(self.first_layer.get_seq_length()) != cached + new:
            raise ValueError(
                "past_key_values: the layers have different numbers of tokens, because an earlier "
                "call failed between them; begin with a new cache"
            )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise TypeError("this layer of a cache is initialised by `extend`")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Given, **kwargs: Given
    ) -> tuple[Tensor, Tensor]:
        """The new keys and values, unchanged."""
        return key_states, value_states

    @property
    def is_croppable(self) -> bool:
        """Whether the last tokens can be removed without recorded calls."""
        return self.cache is None or self.cache.can_crop

    def check_removal(self, tokens_to_remove: int) -> None:
        """Raise an error unless the number is that of `crop` in Transformers: −3 for three."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop: minus the number of tokens to remove expected; found {tokens_to_remove}"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.cache is not None:
            self.cache = self.cache.reorder(beam_idx.to(self.cache.length.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.cache is not None:
            rows = torch.arange(self.cache.length.shape[0], device=self.cache.length.device)
            self.reorder_cache(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def offload(self) -> None:
        raise TypeError(NOT_OFFLOADED)

    def prefetch(self) -> None:
        raise TypeError(NOT_OFFLOADED)


Extend = Callable[[Cache, int], Cache]
"""A function that extends a cache by the given number of a call's first tokens."""


class RecordedCall(NamedTuple):
    """A recorded call of a layer."""

    before: Cache
    seen: int
    """The number of columns before the call."""
    extend: Extend


class DraftRecording(list[RecordedCall]):
    """The calls since the last `crop` of a layer whose cache, a state or a window, can not go back.

    To remove wrong drafts, the layer goes back to the last cache before them, and computes
    attention for the tokens in between again, without the MLP.
    """

    def before(self, left: int) -> Cache | None:
        """The cache of the first `left` columns; None if they were not recorded."""
        call = next((call for call in reversed(self) if call.seen <= left), None)
        if call is None:
            return None
        count = left - call.seen
        return call.extend(call.before, count) if count else call.before


class GrowingLayer(CacheLayer):
    """The base class of layers that grow with their tokens, and may record calls."""

    def __init__(self, record_past: bool = False) -> None:
        super().__init__()
        self.tokens = 0
        """The number of slots in use, those of padding too."""
        self.recording = DraftRecording() if record_past else None
        """The calls since the last `crop`; None if they are not recorded."""

    def activate_past_recording(self) -> None:
        self.recording = self.recording or DraftRecording()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.recording = self.recording and DraftRecording()

    def reset(self) -> None:
        self.recording = self.recording and DraftRecording()
        self.cache, self.tokens = None, 0
        self.is_initialized = False

    def get_seq_length(self) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of slots including the new tokens, and the index of the first slot."""
        return self.tokens + query_length, 0

    def get_max_length(self) -> int:
        return -1


def new_columns(key_mask: Tensor, cached: Tensor | int, new: int) -> Tensor:
    """The columns (b, t) of the new tokens in a mask of all slots, or of the new ones alone."""
    if key_mask.shape[1] == new:
        return key_mask
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
