"""Slots, which declare the cache buffers of a leaf; empty buffers, and the filled part of others.

If the lengths can be read, the time of a step depends on the longest one, not on the capacity.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from precondattn.arrays import (
    HALF,
    Array,
    Arrays,
    ByName,
    Shape,
    dtype_name,
    namespace,
    placement,
)
from precondattn.cache.kinds import REWRITTEN, STATE, TOKENS, Kind
from precondattn.frame import Frame

KEY_MASK = "key_mask"
"""The name of the buffer (b, c) with the mask of cached keys, in a cache with `key_mask=True`."""


class Slot(NamedTuple):
    """The declaration of one cache buffer of a leaf."""

    name: str
    """The leaf's name for the buffer."""
    holds: str
    """The value whose history the buffer stores, as a template over the leaf's inputs and `out`,
    such as `"rms({k})"`. Leaves that store the same value share one buffer."""
    pattern: str
    """The buffer's shape in dimension letters, such as `"b c n d"`; `c` is the capacity."""
    wide: bool = False
    """Whether the buffer is in float32 if the inputs are in half precision."""
    is_rewritten: bool = False
    """Whether a step also changes the rows of cached tokens."""
    empty: float = 0.0
    """The value of all entries before the first token."""
    symbol: str = ""
    """The short name of a state in `Cache.states`, as on the mechanism's page."""

    @property
    def kind(self) -> Kind:
        if self.pattern.split()[1] != "c":
            return Kind(STATE, self.wide, symbol=self.symbol)
        return Kind(REWRITTEN if self.is_rewritten else TOKENS, self.wide)


def new_buffer(slot: Slot, shape: Shape, like: Array) -> Array:
    """An empty buffer for `slot`, in the library and on the device of `like`, and in its dtype."""
    xp = namespace(like)
    kind = slot.kind
    dtype = xp.float32 if slot.wide and dtype_name(like) in HALF else like.dtype
    axis = kind.token_axis(len(shape))
    others = (shape[0], *shape[2:])
    in_memory = (*others[:axis], shape[1], *others[axis:])
    buffer = xp.zeros(in_memory, dtype=dtype, **placement(like))
    return kind.from_memory_order(buffer + slot.empty if slot.empty else buffer)


def held_part(
    declared: Iterable[Slot], past: ByName, frame: Frame, *, room: int = 0
) -> tuple[Arrays, Frame]:
    """The buffers of slots up to the longest sequence's length plus `room`, and their frame."""
    names = [slot.name for slot in declared if "c" in slot.pattern.split()]
    if frame.is_traced or not names:
        return dict(past), frame
    capacity = past[names[0]].shape[1]
    slots = min(longest_held(frame) + room, capacity)
    if slots == capacity:
        return dict(past), frame
    held = {name: a[:, :slots, ...] if name in names else a for name, a in past.items()}
    return held, frame.of_slots(slots)


def longest_held(frame: Frame) -> int:
    """The number of cached tokens of the longest sequence."""
    if frame.longest is not None:
        return frame.longest
    return int(namespace(frame.q_position).max(frame.q_position[:, 0]))
