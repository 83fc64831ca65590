"""How arrays lie for kernels: in C order, from a multiple of 16 bytes on; and masks as bytes."""

from __future__ import annotations

from typing import Any, NamedTuple

import array_api_compat

from precondattn.arrays import Array, library_of, namespace
from precondattn.frame import Frame

ALIGNMENT = 16
"""Bytes that are read at once."""


def in_one_piece(array: Array) -> Array:
    """The array itself where it lies as kernels read it, or else a copy."""
    if array.flags.c_contiguous and _address(array) % ALIGNMENT == 0:
        return array
    found = empty(array, array.shape, array.dtype)
    found[...] = array
    return found


def _address(array: Array) -> int:
    return int(array.data.ptr if library_of(array) == "cupy" else array.ctypes.data)


def by_16(array: Array) -> bool:
    """Whether each of its rows is a number of 16 bytes."""
    return bool(array.shape[-1] * array.dtype.itemsize % ALIGNMENT == 0)


def empty(like: Array, shape: tuple[int, ...], dtype: Any = None) -> Array:
    """An array that no one has written, on the device of another one."""
    dtype = like.dtype if dtype is None else dtype
    return namespace(like).empty(shape, dtype=dtype, device=array_api_compat.device(like))


class Masks(NamedTuple):
    """What a frame hides, as kernels read it; None where nothing is hidden so."""

    q_valid: Array | None
    """(b, t), of bytes"""
    k_valid: Array | None
    """(b, s), of bytes"""
    q_segment: Array | None
    """(b, t), which run of equal ids a query belongs to, of 32 bits"""
    k_segment: Array | None
    """(b, s), of 32 bits"""


def masks_of(frame: Frame, b: int, t: int) -> Masks:
    """For a full call of t queries, whose positions are those of the last t keys."""
    q_segment, k_segment = None, frame.k_segment
    if k_segment is not None:
        # Numbers of runs, since the ids themselves may have 64 bits; equal ids stand together.
        xp = namespace(k_segment)
        is_new = k_segment[:, 1:] != k_segment[:, :-1]
        k_segment = xp.zeros(
            k_segment.shape, dtype=xp.int32, device=array_api_compat.device(k_segment)
        )
        k_segment[:, 1:] = xp.cumulative_sum(xp.astype(is_new, xp.int32), axis=1, dtype=xp.int32)
        q_segment = in_one_piece(k_segment[:, k_segment.shape[1] - t :])
    return Masks(bytes_of(frame.q_valid, b), bytes_of(frame.k_valid, b), q_segment, k_segment)


def bytes_of(valid: Array | None, b: int) -> Array | None:
    """(b, t), a byte each, of a mask for each sequence or for all."""
    if valid is None:
        return None
    xp = namespace(valid)
    return in_one_piece(xp.astype(xp.broadcast_to(valid, (b, valid.shape[1])), xp.uint8))
