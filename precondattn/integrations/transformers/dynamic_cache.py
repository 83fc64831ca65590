"""The layer of a dynamic cache, which grows with its tokens."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from precondattn.algebra.mechanism import Mechanism
from precondattn.cache import Cache
from precondattn.integrations.transformers.cache import (
    ANY,
    GrowingLayer,
    RecordedCall,
    check_cached_mask,
    new_columns,
    with_key_mask,
)
from precondattn.integrations.transformers.masks import ModelMasks
from precondattn.integrations.transformers.rollback import undone_if_failed

FEWEST = 64
"""The smallest capacity."""


class DynamicCacheLayer(GrowingLayer):
    """The layer of a dynamic cache; when it is full, its capacity grows by half."""

    def extend(self, mechanism: Mechanism, arrays: dict[str, Tensor], masks: ModelMasks) -> Tensor:
        """The output for new tokens, which are added to the cache; inputs are by name.

        The `key_mask` is (b, t) or (b, s), of the new tokens or of all slots.
        """
        key_mask = masks.key_mask
        new = arrays["q"].shape[1]
        cache = self._with_room(mechanism, arrays, new)
        if not torch.compiler.is_compiling():
            self.check_first(self.tokens, new)
            check_cached_mask(cache, key_mask, self.tokens, new)
        if key_mask is not None:
            key_mask = new_columns(key_mask, self.tokens, new)
            cache = with_key_mask(cache)
        is_recorded = self.recording is not None and not cache.can_crop
        if self.cache is not None:
            self.cache = cache  # It is refused if this call fails after it was donated.
        donate = not torch.is_grad_enabled() and not is_recorded
        inputs = {**arrays, "key_mask": key_mask, "attn_mask": masks.attn_mask}
        out, self.cache = mechanism.extend(cache, **inputs, donate=donate)
        if self.recording is not None and is_recorded:
            extend = partial(_extended, mechanism, arrays, key_mask)
            self.recording.append(RecordedCall(cache, self.tokens, extend))
        self.tokens += new
        self.is_initialized = True
        return out

    def _with_room(self, mechanism: Mechanism, arrays: dict[str, Tensor], new: int) -> Cache:
        needed = self.tokens + new
        room = max(FEWEST, needed + needed // 2)
        if self.cache is None:
            has_window = mechanism.program.reach is not None
            # The buffers of a window have no room for a mask that is added later.
            return mechanism.init_cache(
                **arrays, capacity=ANY if has_window else room, key_mask=has_window
            )
        capacity = self.cache.capacity
        return self.cache if capacity is None or capacity >= needed else self.cache.grow(room)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens: −3 for the last three, as in Transformers."""
        self.check_removal(tokens_to_remove)
        left, recorded = self.tokens + tokens_to_remove, self.recording
        with undone_if_failed(self):
            if tokens_to_remove and self.cache is not None:
                if self.cache.can_crop:
                    self.cache = self.cache.crop(left, donate=not torch.is_grad_enabled())
                else:
                    self.cache = None if recorded is None else recorded.before(left)
                if self.cache is None:
                    raise ValueError(
                        "crop: the cache of a window or of a state can not be cropped; call "
                        "activate_past_recording() before the tokens that may be removed"
                    )
                self.tokens = left
            if recorded is not None:
                recorded.clear()


def _extended(
    mechanism: Mechanism,
    arrays: dict[str, Tensor],
    key_mask: Tensor | None,
    cache: Cache,
    count: int,
) -> Cache:
    """The cache with the first `count` tokens of a recorded call."""
    patterns = mechanism.inputs
    of_tokens = {
        n: x[:, :count] if {*patterns[n].letters} & {"t", "s"} else x for n, x in arrays.items()
    }
    of_mask = None if key_mask is None else key_mask[:, :count]
    _, longer = mechanism.extend(cache, **of_tokens, key_mask=of_mask)
    return longer
