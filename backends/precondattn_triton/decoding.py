"""Host code that the decoding kernels share: masks of a step, and how its cache is divided."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from precondattn.frame import Frame
from precondattn_triton.launching import cdiv
from precondattn_triton.target import processors
from precondattn_triton.tiles import bytes_of

PROGRAMS_PER_PROCESSOR = 2
"""Programs per multiprocessor that read the cache: enough to hide the latency of memory."""


class StepMasks(NamedTuple):
    """The validity of the tokens of a step, as bytes; None where all are valid."""

    slots: int
    """Slots to read: the cached tokens of every sequence, or the slots of the cache."""
    past_valid: Tensor | None
    """(b, slots)"""
    new_valid: Tensor | None
    """(b, t), keys"""
    is_token: Tensor | None
    """(b, t), queries"""

    @property
    def strides(self) -> tuple[int, int, int]:
        """The strides of the batch axes of the three."""
        past, new, token = (0 if a is None else a.stride(0) for a in self[1:])
        return past, new, token


def step_masks(frame: Frame, b: int, capacity: int) -> StepMasks:
    """The masks of new tokens after a cache of `capacity` slots."""
    # The key of a valid token may be masked.
    is_token = bytes_of(frame.q_valid, b)
    if frame.held is not None:
        return StepMasks(frame.held, None, None, is_token)
    valid = bytes_of(frame.k_valid, b)
    assert valid is not None  # The frame of an extension always has the validity of slots.
    return StepMasks(capacity, valid[:, :capacity], valid[:, capacity:], is_token)


def lengths_of(frame: Frame, b: int) -> Tensor:
    """The number of cached tokens of each sequence (b,)."""
    return frame.q_position[:, 0].expand(b).contiguous()


def splits_of(like: Tensor, count: int, heads: int, tile: int) -> tuple[int, int]:
    """The number of programs that share a head's tokens, and the tokens of each, in whole tiles."""
    tiles = max(cdiv(count, tile), 1)
    wanted = max(PROGRAMS_PER_PROCESSOR * processors(like) // heads, 1)
    per_split = cdiv(tiles, min(wanted, tiles)) * tile
    return max(cdiv(count, per_split), 1), per_split
