"""The part of a cache that a step reads, and the number of multiprocessors that share the work."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from precondattn.arrays import Array
from precondattn.frame import Frame
from precondattn_cupy.launch import is_simulated
from precondattn_cupy.layout import bytes_of

SIMULATED = 4
"""Processors of a simulated device"""


class FilledSlots(NamedTuple):
    """The number of slots to read, and the validity of slots and of the new token."""

    slots: int
    """The largest number over all sequences"""
    valid: Array | None
    """(b, c), of bytes"""
    is_query: Array | None
    """(b, 1), of bytes"""
    is_key: Array | None
    """(b, 1), of bytes"""


def past_of(frame: Frame, b: int, capacity: int) -> FilledSlots:
    """The filled slots for the frame of one new token after `capacity` slots."""
    if frame.held is not None:
        return FilledSlots(frame.held, None, None, None)
    valid = frame.k_valid
    assert valid is not None  # The frame of an extension always marks filled slots.
    return FilledSlots(
        capacity,
        bytes_of(valid[:, :capacity], b),
        bytes_of(frame.q_valid, b),
        bytes_of(valid[:, capacity:], b),
    )


def processors() -> int:
    """Multiprocessors of the current device."""
    if is_simulated():
        return SIMULATED
    import cupy

    return _processors_of(int(cupy.cuda.Device().id))


@cache
def _processors_of(device: int) -> int:
    import cupy

    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])
