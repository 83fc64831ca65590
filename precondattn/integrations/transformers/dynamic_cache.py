"""The layer of a dynamic cache, which grows with its tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from precondattn.algebra.mechanism import Mechanism
from precondattn.cache import Cache, Snapshot
from precondattn.integrations.transformers.cache import ANY, CacheLayer
from precondattn.integrations.transformers.padding import check_held, new_columns, with_key_mask
from precondattn.integrations.transformers.rollback import undone_if_failed

FEWEST = 64
"""The smallest capacity."""


class Recording(NamedTuple):
    """Recorded calls that `crop` may undo: the cache before them, and their arguments."""

    before: Snapshot | None
    calls: list[tuple[Mechanism, dict[str, Tensor], Tensor | None]]


class DynamicCacheLayer(CacheLayer):
    """The layer of a dynamic cache; when it is full, its capacity grows by half."""

    def __init__(self, record_past: bool = False) -> None:
        super().__init__()
        self.tokens = 0
        """The number of slots in use."""
        self.record_past = record_past
        """Whether calls are recorded until the next `crop`, for a cache that can not be cropped."""
        self._recording: Recording | None = None

    def extend(
        self,
        mechanism: Mechanism,
        arrays: dict[str, Tensor],
        key_mask: Tensor | None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        new = arrays["q"].shape[1]
        cache = self._with_room(mechanism, arrays, new)
        if not torch.compiler.is_compiling():
            self.check_first(self.tokens, new)
            check_held(cache, key_mask, self.tokens, new)
        if key_mask is not None:
            key_mask = new_columns(key_mask, self.tokens, new)
            cache = with_key_mask(cache)
        is_recorded = self.record_past and not cache.can_crop
        if is_recorded and self._recording is None:
            self._recording = Recording(cache.snapshot() if self.tokens else None, [])
        if self.cache is not None:
            self.cache = cache  # It is refused if this call fails after it was donated.
        donate = not torch.is_grad_enabled()
        given = {**arrays, "key_mask": key_mask, "attn_mask": attn_mask}
        out, self.cache = mechanism.extend(cache, **given, donate=donate)
        if is_recorded:
            self._recording.calls.append((mechanism, arrays, key_mask))  # type: ignore[union-attr]
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
        """Remove the last tokens.

        Parameters
        ----------
        tokens_to_remove : int
            The negative number of tokens to remove, as in Transformers: −3 for the last three.

        Raises
        ------
        ValueError
            for a positive number, and for a window or a state whose calls were not recorded.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop: minus the number of tokens to remove expected; found {tokens_to_remove}"
            )
        kept = self.tokens + tokens_to_remove
        with undone_if_failed(self):
            recording, self._recording = self._recording, None
            if tokens_to_remove == 0 or self.cache is None:
                return
            if self.cache.can_crop:
                self.cache = self.cache.crop(kept, donate=not torch.is_grad_enabled())
                self.tokens = kept
            elif recording is None:
                raise ValueError(
                    "crop: the cache of a window or of a state can not be cropped; call "
                    "activate_past_recording() before the tokens that may be removed"
                )
            else:
                self._replay(recording, kept)

    def _replay(self, recording: Recording, kept: int) -> None:
        """Go back to the start of the recording, and extend the cache again to `kept` tokens."""
        recorded = sum(arrays["q"].shape[1] for _, arrays, _ in recording.calls)
        start = self.tokens - recorded
        if kept < start:
            raise ValueError(
                f"crop: only the last {recorded} tokens were recorded; found {self.tokens - kept} "
                f"to remove"
            )
        if recording.before is None:
            self.cache = None
        else:
            self.cache = self.cache.restore(recording.before)  # type: ignore[union-attr]
        self.tokens, records, self.record_past = start, self.record_past, False
        for mechanism, arrays, key_mask in recording.calls:
            new = min(arrays["q"].shape[1], kept - self.tokens)
            if new <= 0:
                break
            is_row = {
                name: "t" in p.letters or "s" in p.letters for name, p in mechanism.inputs.items()
            }
            first = {name: x[:, :new] if is_row[name] else x for name, x in arrays.items()}
            self.extend(mechanism, first, None if key_mask is None else key_mask[:, :new])
        self.record_past = records

    def activate_past_recording(self) -> None:
        self.record_past = True

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._recording = None

    def reset(self) -> None:
        self.cache, self._recording, self.tokens = None, None, 0
        self.is_initialized = False

    def get_seq_length(self) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of slots including the new tokens, and the index of the first slot."""
        return self.tokens + query_length, 0

    def get_max_length(self) -> int:
        return -1
