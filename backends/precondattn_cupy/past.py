"""What a step looks at of a cache, and how many processors share the work."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from precondattn.arrays import Array
from precondattn.frame import Frame, UniformFrame
from precondattn_cupy.launch import is_simulated
from precondattn_cupy.layout import bytes_of

SIMULATED = 4
"""Processors of a device that is not there."""


class Past(NamedTuple):
    """How many slots to look at, and what of them and of the new token counts."""

    count: int
    """Of every sequence at most."""
    valid: Array | None
    """(b, c), of bytes"""
    is_query: Array | None
    """(b, 1), of bytes"""
    is_key: Array | None
    """(b, 1), of bytes"""


def past_of(frame: Frame, b: int, capacity: int) -> Past:
    """Of a frame of one new token behind `capacity` slots."""
    if isinstance(frame, UniformFrame):
        return Past(frame.held, None, None, None)
    valid = frame.k_valid
    assert valid is not None  # The frame of an extension always says which slots are filled.
    return Past(
        capacity,
        bytes_of(valid[:, :capacity], b),
        bytes_of(frame.q_valid, b),
        bytes_of(valid[:, capacity:], b),
    )


def processors() -> int:
    """Of the current device."""
    if is_simulated():
        return SIMULATED
    import cupy

    return _processors_of(int(cupy.cuda.Device().id))


@cache
def _processors_of(device: int) -> int:
    import cupy

    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])
