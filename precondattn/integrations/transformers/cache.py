"""Layers of a Transformers cache that contain a `precondattn.Cache`.

Transformers calls `update(k, v)` before attention. Here it only returns the new tokens. The
attention function then calls `extend`, which also gets q, and stores what the mechanism needs.

Every slot is a token or padding, as in Transformers' own layers. The buffer `key_mask` masks
padding.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from precondattn.algebra.mechanism import Mechanism
from precondattn.cache import Cache
from precondattn.given import Given
from precondattn.integrations.transformers.interface import CacheLayerMixin

ANY = 2**30
"""A capacity above every window, so that a mechanism with a window has the cache of a window."""

NOT_OFFLOADED = (
    "past_key_values: an offloaded cache moves copies of keys and values between devices, and a "
    "mechanism's cache has other buffers; use one without offloading"
)

PREFIX_TUNING = "PEFT's prefix tuning can not be used here; its prompt tuning and P-tuning can"


class CacheLayer(CacheLayerMixin):
    """The base class of the dynamic and the static layer."""

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

    @abstractmethod
    def extend(
        self,
        mechanism: Mechanism,
        arrays: dict[str, Tensor],
        key_mask: Tensor | None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """The output for new tokens, which are added to the cache.

        Parameters
        ----------
        arrays
            The mechanism's inputs by name: q, k, v (b, t, heads, width), and parameters.
        key_mask : boolean tensor (b, t) or (b, s), optional
            False for padding: of the new tokens, or of all slots from the first on.
        attn_mask : boolean tensor (b or 1, h or 1, t, s), optional
            The mask of pairs, as in the mechanism's `extend`.
        """

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
