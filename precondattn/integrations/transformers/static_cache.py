"""The layer of a static cache, whose buffers keep their addresses, for compiled decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from precondattn.algebra.mechanism import Mechanism
from precondattn.cache import KEY_MASK, Cache
from precondattn.cache.conversion import ordinary
from precondattn.cache.kinds import empty_if_donated, holding, kinds_of
from precondattn.cache.windows import FIRST
from precondattn.integrations.transformers.cache import (
    ANY,
    CacheLayer,
    check_cached_mask,
    new_columns,
)
from precondattn.integrations.transformers.masks import ModelMasks


class StaticCacheLayer(CacheLayer):
    """The layer of a static cache for `max_cache_len` tokens, which is written to in place.

    The number of tokens is a tensor, so that a compiled step is one graph for all of them. Without
    `max_cache_len` there is no limit, and the mechanism must read a window of tokens only.
    """

    is_compileable = True
    is_croppable = True

    def __init__(self, max_cache_len: int | None) -> None:
        super().__init__()
        self.max_cache_len = max_cache_len
        self.may_have_padding = False
        """Whether some token is masked, as far as it is known: the mask of a compiled step is not
        read, and the buffers of a window move with their mask."""

    def extend(self, mechanism: Mechanism, arrays: dict[str, Tensor], masks: ModelMasks) -> Tensor:
        key_mask, attn_mask = masks.key_mask, masks.attn_mask
        if torch.is_grad_enabled() and any(x.requires_grad for x in arrays.values()):
            raise ValueError(
                "past_key_values: a static cache is written to in place, so it has no gradient; "
                "use a DynamicCache, or torch.no_grad()"
            )
        if self.cache is None:
            self.cache = self._empty(mechanism, arrays)
        self.cache = cache = ordinary(self.cache)
        new = arrays["q"].shape[1]
        if torch.compiler.is_compiling() or FIRST in cache.store:
            self.may_have_padding = True
        if not torch.compiler.is_compiling():
            kinds_of(cache)  # It refuses a cache that was donated.
            cached = int(cache.length[0])
            self._check_room(cached, new)
            self.check_first(cached, new)
            check_cached_mask(cache, key_mask, cached, new)
        if key_mask is not None:
            key_mask = new_columns(key_mask, cache.length[0], new)
        if not torch.compiler.is_compiling() and not self.may_have_padding:
            if key_mask is None or bool(key_mask.all()):
                without = self._stored_apart(cached, new)
                return self._donated(mechanism, without, **arrays, attn_mask=attn_mask)
            self.may_have_padding = True
        # A donation empties the dict, and the buffers stay.
        donated = holding(cache, cache.length, dict(cache.store))
        return self._donated(mechanism, donated, **arrays, key_mask=key_mask, attn_mask=attn_mask)

    def _stored_apart(self, cached: int, new: int) -> Cache:
        """The cache without its mask, in which new tokens that are all valid are stored."""
        assert self.cache is not None
        length, store, kinds = self.cache
        # No call reads the new columns before the length changes.
        store[KEY_MASK][:, cached : cached + new] = True
        without = ({n: x for n, x in of.items() if n != KEY_MASK} for of in (store, kinds))
        return Cache(length, *without)

    def _donated(self, mechanism: Mechanism, donated: Cache, **named: Any) -> Tensor:
        """The output; the cache is refused until `reset` if this fails after its first write."""
        assert self.cache is not None
        try:
            out, longer = mechanism.extend(donated, **named, donate=True)
            self._write(longer)
        except BaseException:
            empty_if_donated(self.cache, donated)
            raise
        return out

    def _check_room(self, cached: int, new: int) -> None:
        if self.max_cache_len is not None and cached + new > self.max_cache_len:
            raise ValueError(
                f"past_key_values: this static cache is for {self.max_cache_len} tokens; found "
                f"{new} new ones after {cached}"
            )

    def _empty(self, mechanism: Mechanism, arrays: dict[str, Tensor]) -> Cache:
        capacity = self.max_cache_len
        if capacity is None:
            if mechanism.program.reach is None:
                raise ValueError(
                    f"past_key_values: Transformers' static cache of a sliding window does not say "
                    f"how many tokens will follow, and {mechanism} stores all of them; pass "
                    f"past_key_values=static_cache(model, max_cache_len)"
                )
            capacity = ANY
        cache = mechanism.init_cache(**arrays, capacity=capacity, key_mask=True)
        if not torch.compiler.is_compiling():
            for buffer in (cache.length, *cache.store.values()):
                torch._dynamo.mark_static_address(buffer)
        self.is_initialized = True
        self.batch_size = cache.length.shape[0]
        return cache

    def _write(self, longer: Cache) -> None:
        """Copy arrays that are not already in their buffers."""
        assert self.cache is not None
        for name, array in longer.store.items():
            if array is not self.cache.store[name]:
                self.cache.store[name].copy_(array)
        self.cache.length.copy_(longer.length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.cache is not None:
            self.batch_size = self.cache.length.shape[0]

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens: −3 for the last three, as in Transformers."""
        self.check_removal(tokens_to_remove)
        if self.cache is not None and tokens_to_remove:
            self._write(self.cache.crop(self.cache.length + tokens_to_remove))

    def reset(self) -> None:
        self.may_have_padding = False
        if self.cache is not None and not self.cache.store:
            self.cache = None  # A call has failed.
        if self.cache is not None:
            for buffer in (self.cache.length, *self.cache.store.values()):
                buffer.zero_()

    def get_seq_length(self) -> Tensor | int:
        return 0 if self.cache is None else self.cache.length[0].long()

    def get_mask_sizes(self, query_length: int) -> tuple[int, Tensor | int]:
        """The number of slots, and the index of the first one."""
        if self.max_cache_len is None:
            return query_length, self.get_seq_length()
        return self.max_cache_len, 0

    def get_max_length(self) -> int:
        return -1 if self.max_cache_len is None else self.max_cache_len
