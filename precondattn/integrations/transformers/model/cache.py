"""`PrecondattnCache`: the caches of all layers, as a cache of Transformers.

A layer's `precondattn.Cache` counts the valid tokens of each sequence. Transformers counts columns,
those of padding too: the length that it sees is the same for all sequences.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NoReturn, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache as HFCache

from precondattn.cache import Cache
from precondattn.cache.kept import without_kept, without_way_back
from precondattn.given import Given, at_least
from precondattn.integrations.transformers.cache import (
    DraftRecording,
    Extend,
    GrowingLayer,
    RecordedCall,
)
from precondattn.integrations.transformers.rollback import undone_if_failed
from precondattn.layers.torch import Attention

ROOM = 32
"""The additional tokens for which a new cache has room."""


class LayerCache(GrowingLayer):
    """The cache of one layer, which grows as needed unless it has a fixed capacity."""

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__()
        self.capacity = capacity
        self.kept = 0
        """The number of last columns for which the cache has the states before them."""

    def room_for(self, attention: Attention, batch: int, count: int) -> Cache:
        """The layer's cache, with room for `count` more tokens of `batch` sequences."""
        needed = self.tokens + count
        if self.cache is None:
            return attention.init_cache(batch, self.capacity or needed + ROOM)
        if self.cache.length.shape[0] != batch:
            raise ValueError(
                f"past_key_values has {self.cache.length.shape[0]} sequences; found {batch} in the "
                f"batch"
            )
        room = self.cache.capacity
        if self.capacity is None and room is not None and needed > room:
            self.cache = self.cache.grow(max(needed, 2 * room))
        return self.cache

    def keep(self, cache: Cache, extend: Extend) -> bool:
        """Whether the cache before a call is kept, so that the call must not write to it."""
        if self.recording is None or cache.can_crop:
            return False
        self.recording.append(RecordedCall(cache, self.tokens, extend))
        return True

    def drafts(self, cache: Cache, count: int) -> int:
        """The number of drafts for which states are kept: `count`, or 0."""
        is_wanted = self.recording is not None and not cache.can_crop
        return count if is_wanted and not without_way_back(cache) else 0

    def hold(self, cache: Cache, count: int, kept: int) -> None:
        """Keep the cache after `count` more columns, with the states before the last `kept`."""
        self.cache, self.kept = cache, kept
        self.tokens += count
        self.is_initialized = True

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be removed without a recording; unknown, and so False, if empty."""
        return self.cache is not None and self.cache.can_crop

    def crop(self, left: int, lengths: Given) -> None:
        """Keep `left` columns, which are `lengths` valid tokens of each sequence."""
        if self.is_croppable or self.tokens - left <= self.kept:
            self.cache = cast(Cache, self.cache).crop(lengths)
        else:
            self.cache = cast(DraftRecording, self.recording).before(left)
        self.tokens = left

    def can_go_back_to(self, left: int) -> bool:
        """Whether `crop` can keep `left` columns."""
        if self.is_croppable or self.tokens - left <= self.kept:
            return True
        return any(call.seen <= left for call in self.recording or ())

    def get_max_length(self) -> int:
        return -1 if self.capacity is None else self.capacity

    def reset(self) -> None:
        super().reset()
        self.kept = 0

    def forget(self) -> None:
        """Drop the recorded calls and the kept states."""
        if self.recording is not None:
            self.recording.clear()
        if self.kept:
            self.cache, self.kept = without_kept(cast(Cache, self.cache)), 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.forget()
        super().reorder_cache(beam_idx)

    def update(self, *args: Given, **kwargs: Given) -> NoReturn:
        raise TypeError(
            "PrecondattnCache is filled by PrecondattnForCausalLM only; another model has a cache "
            "of its own"
        )


class PrecondattnCache(HFCache):
    """The cache of a `PrecondattnForCausalLM`, to be passed as `past_key_values`.

    Parameters
    ----------
    config : PrecondattnConfig
        The configuration of the model.
    capacity : int, optional
        The largest number of tokens, whose memory is allocated at once. By default the cache grows.

    Examples
    --------
    >>> import torch
    >>> from precondattn.integrations.transformers import (
    ...     PrecondattnCache, PrecondattnConfig, PrecondattnForCausalLM
    ... )
    >>> config = PrecondattnConfig(
    ...     vocab_size=50, hidden_size=16, num_attention_heads=2, layer_types=["gla", "lucid"]
    ... )
    >>> model, cache = PrecondattnForCausalLM(config), PrecondattnCache(config)
    >>> _ = model(torch.tensor([[1, 2, 3]]), past_key_values=cache)
    >>> cache.get_seq_length(), cache.is_croppable
    (3, False)
    """

    def __init__(self, config: Given, capacity: int | None = None) -> None:
        capacity = None if capacity is None else at_least(1, "capacity", capacity)
        super().__init__(layers=[LayerCache(capacity) for _ in range(config.num_hidden_layers)])
        self.valid: Tensor | None = None
        """False for padding (b, seen); None without padding."""
        self.drafts = 0
        """The number of drafts among the next tokens, of which `crop` may remove any number."""

    def undone_if_failed(self) -> AbstractContextManager[None]:
        """A block after whose failure the cache is as before, but donated parts stay refused."""
        return undone_if_failed(self, *self.layers)

    def reset(self) -> None:
        super().reset()
        self.valid = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace sequence i by sequence `beam_idx[i]`."""
        with self.undone_if_failed():
            super().reorder_cache(beam_idx)
            if self.valid is not None:
                self.valid = self.valid.index_select(0, beam_idx.to(self.valid.device))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the sequences `indices`."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times."""
        cache = self.layers[0].cache
        if cache is not None:
            batch = torch.arange(cache.length.shape[0], device=cache.length.device)
            self.reorder_cache(batch.repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; their number is negative, as Transformers passes it.

        Where a layer's cache is a state, a window or has rewritten rows, only tokens since
        `activate_past_recording`, or since the `crop` after it, can be removed.

        Raises
        ------
        ValueError
            if tokens of such a layer were not recorded; and for a number out of range.
        """
        seen = self.get_seq_length()
        if not -seen <= tokens_to_remove <= 0:
            raise ValueError(
                f"crop: tokens_to_remove must be between {-seen} and 0; found {tokens_to_remove}"
            )
        left = seen + tokens_to_remove
        fixed = [i for i, layer in enumerate(self.layers) if not layer.can_go_back_to(left)]
        if fixed:
            raise ValueError(
                f"crop: the cache of layer {fixed[0]} has the buffers "
                f"{', '.join(self.layers[fixed[0]].cache.store)}, which can not be cropped; call "
                f"activate_past_recording() before the tokens that may be removed"
            )
        with self.undone_if_failed():
            if tokens_to_remove:
                if self.valid is not None:
                    self.valid = self.valid[:, :left]
                for layer in self.layers:
                    lengths: Given = left
                    if self.valid is not None:
                        lengths = self.valid.sum(1, dtype=layer.cache.length.dtype)
                    layer.crop(left, lengths)
            for layer in self.layers:
                layer.forget()
