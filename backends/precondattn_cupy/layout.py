"""What kernels read: arrays in C order, aligned to 16 bytes; masks as bytes; slots of a cache."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import array_api_compat

from precondattn.arrays import Array, DType, library_of, namespace
from precondattn.frame import Frame
from precondattn_cupy.launch import is_simulated

ALIGNMENT = 16
"""Bytes of one aligned access."""


def in_one_piece(array: Array) -> Array:
    """The array itself if it has the kernels' layout, or else a copy."""
    if array.flags.c_contiguous and _address(array) % ALIGNMENT == 0:
        return array
    result = empty(array, array.shape, array.dtype)
    result[...] = array
    return result


def _address(array: Array) -> int:
    return int(array.data.ptr if library_of(array) == "cupy" else array.ctypes.data)


def by_16(array: Array) -> bool:
    """Whether the length of each row is a multiple of 16 bytes."""
    return bool(array.shape[-1] * array.dtype.itemsize % ALIGNMENT == 0)


def empty(like: Array, shape: tuple[int, ...], dtype: DType | None = None) -> Array:
    """An uninitialized array on the device of `like`."""
    dtype = like.dtype if dtype is None else dtype
    return namespace(like).empty(shape, dtype=dtype, device=array_api_compat.device(like))


class KernelMasks(NamedTuple):
    """Masks of a frame in the form that kernels read; None where nothing is masked."""

    q_valid: Array | None
    """(b, t), of bytes"""
    k_valid: Array | None
    """(b, s), of bytes"""
    q_segment: Array | None
    """(b, t), the index of a query's run of equal ids, in 32 bits"""
    k_segment: Array | None
    """(b, s), in 32 bits"""


def masks_of(frame: Frame, b: int, t: int) -> KernelMasks:
    """Masks of a full call of t queries, which have the positions of the last t keys."""
    q_segment, k_segment = None, frame.k_segment
    if k_segment is not None:
        # Indices of runs, since the ids themselves may have 64 bits; equal ids are contiguous.
        xp = namespace(k_segment)
        is_new = k_segment[:, 1:] != k_segment[:, :-1]
        k_segment = xp.zeros(
            k_segment.shape, dtype=xp.int32, device=array_api_compat.device(k_segment)
        )
        k_segment[:, 1:] = xp.cumulative_sum(xp.astype(is_new, xp.int32), axis=1, dtype=xp.int32)
        q_segment = in_one_piece(k_segment[:, k_segment.shape[1] - t :])
    return KernelMasks(bytes_of(frame.q_valid, b), bytes_of(frame.k_valid, b), q_segment, k_segment)


def bytes_of(valid: Array | None, b: int) -> Array | None:
    """A mask of each sequence, or of all, as one byte per token (b, t)."""
    if valid is None:
        return None
    xp = namespace(valid)
    return in_one_piece(xp.astype(xp.broadcast_to(valid, (b, valid.shape[1])), xp.uint8))


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
