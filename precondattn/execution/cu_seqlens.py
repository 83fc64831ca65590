"""`cu_seqlens`: where the sequences of a packed row begin and end, as in flash-attention.

    cu_seqlens = (0, n_1, n_1 + n_2, …):    sequence i has the tokens c_i … c_{i+1} − 1.

It is another way to write `segment_ids`, for calls with b = 1. Tokens after the last sequence are
padding, as those after `lengths` are. Given as whole numbers, as a NumPy array or as a tensor on
the CPU, it is read without waiting for a device.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from precondattn.algebra.declaration import ShapeError
from precondattn.arrays import (
    Array,
    arange_like,
    cast,
    device_of,
    dtype_name,
    host_array,
    is_traced,
    library_of,
    namespace,
    on_device_of,
)
from precondattn.cache.integers import whole_numbers
from precondattn.execution.array_checks import check_device
from precondattn.execution.masks import INTEGERS, ValueChecks
from precondattn.given import Given

NAME = "cu_seqlens"
NARROW = ("int8", "int16", "uint8", "uint16")


class Packed(NamedTuple):
    """The segments of a call with `cu_seqlens`."""

    segment_ids: Array
    """(1, s). Padding has an id of its own."""
    on_host: np.ndarray | None
    """The same, read; None where `cu_seqlens` is traced."""
    lengths: Array | None
    """The number of tokens before the padding (1,), int32; None where there is known to be none."""


def packed_by(owner: str, given: Given, like: Array, b: int, s: int, checks: ValueChecks) -> Packed:
    """The segments, for inputs like `like` with b sequences of s keys.

    Raises
    ------
    TypeError, ValueError
        for anything but integers (n + 1,) from 0 to at most s that never decrease.
    """
    if b != 1:
        raise ShapeError(
            f"{owner}: {NAME} divides one row of tokens, so b = 1 is expected; found b = {b} "
            f"(use segment_ids)"
        )
    bounds = _checked(owner, given, like)
    known = bounds if isinstance(bounds, np.ndarray) else host_array(bounds)
    if known is not None:
        numbers = known.tolist()  # As Python's integers, which do not overflow.
        _check_values(owner, numbers, s)
        end, lengths = numbers[-1], None
        if end < s:
            lengths = on_device_of(like, np.asarray([end], dtype=np.int32))
        counts = np.diff([*numbers, s])
        ids = np.repeat(np.arange(len(counts), dtype=np.int32), counts)[None, :]
        return Packed(on_device_of(like, ids), ids, lengths)
    xp = namespace(bounds)
    if dtype_name(bounds) in NARROW:  # Which s may not fit into.
        bounds = cast(bounds, xp.int32)
    good = (bounds[0] == 0) & (bounds[-1] <= s) & xp.all(bounds[1:] >= bounds[:-1])
    checks.require(xp.reshape(good, (1,)), f"{NAME} must go from 0 to s = {s} and never decrease")
    bounds = cast(bounds, xp.int32)
    ids = xp.searchsorted(bounds[1:], arange_like(s, bounds), side="right")
    segment_ids = on_device_of(like, cast(ids, xp.int32)[None, :])
    return Packed(segment_ids, None, on_device_of(like, bounds[-1:]))


def _checked(owner: str, given: Given, like: Array) -> Array:
    """The bounds: a NumPy array, or an array of the inputs' library. Type and shape are right."""
    if isinstance(given, list | tuple):
        given = np.asarray(whole_numbers(f"{owner}: {NAME}", given), dtype=object)
    library = library_of(given)
    if library not in ("numpy", library_of(like)):
        known = " or ".join(dict.fromkeys(("numpy", str(library_of(like)))))
        found = type(given).__name__ if library is None else f"one of {library}"
        raise TypeError(
            f"{owner}: {NAME} must be a list of whole numbers or an array of {known}; found {found}"
        )
    if dtype_name(given) not in (*INTEGERS, "object"):
        raise TypeError(f"{owner}: {NAME} must have an integer dtype; found {dtype_name(given)}")
    if given.ndim != 1 or given.shape[0] < 2:
        raise ShapeError(
            f"{owner}: {NAME} must have shape (n + 1,) for n sequences; found {tuple(given.shape)}"
        )
    if library != "numpy" and not is_traced(given) and device_of(given) != "cpu":
        check_device(f"{owner}: {NAME}", given, like, " (or give it on the CPU)")
    return given


def _check_values(owner: str, bounds: list[int], s: int) -> None:
    if bounds[0] != 0:
        raise ValueError(f"{owner}: {NAME} must start at 0; found {bounds[0]}")
    for i, (start, stop) in enumerate(pairwise(bounds)):
        if stop < start:
            raise ValueError(
                f"{owner}: {NAME} must not decrease; found {stop} after {start} (entry {i + 1})"
            )
    if bounds[-1] > s:
        raise ValueError(f"{owner}: {NAME} must end at s = {s} or before; found {bounds[-1]}")
