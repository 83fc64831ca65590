"""The filled part of a cache: the slots that at least one sequence uses.

If the lengths can be read, the time of a step depends on the longest one, not on the capacity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from precondattn.arrays import Arrays, ByName, namespace
from precondattn.frame import Frame

if TYPE_CHECKING:
    from precondattn.algebra.leaf_protocol import LeafProtocol


def held_part(
    leaf: LeafProtocol, past: ByName, frame: Frame, *, room: int = 0
) -> tuple[Arrays, Frame]:
    """A leaf's buffers up to the longest sequence's length plus `room`, and their frame."""
    names = [slot.name for slot in leaf.slots() if "c" in slot.pattern.split()]
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
