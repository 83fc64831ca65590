"""The masks of a call: lengths, key masks and segments are checked, and padding is zeroed.

Some errors depend on the entries of arrays: a length out of range, or segments that are not
contiguous. If the arrays are traced, no error can be raised, and on an accelerator it would wait
for the device. Then these sequences are marked invalid, and their output is NaN.

`cu_seqlens` is another way to write `segment_ids`, for calls with b = 1: sequence i has the tokens
from cu_seqlens[i] to cu_seqlens[i + 1] − 1. Tokens after the last sequence are padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from precondattn.algebra.declaration import Inputs, ShapeError
from precondattn.arrays import (
    arange_like,
    cast,
    device_of,
    differs_from_previous,
    dtype_name,
    host_array,
    is_traced,
    library_of,
    namespace,
    on_device_of,
    placement,
    sort,
    zero_where_not,
)
from precondattn.cache.integers import whole_numbers
from precondattn.execution.array_checks import check_device
from precondattn.frameworks.types import Array, ByName, Shape
from precondattn.given import Given

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


class ValueChecks:
    """Checks of array entries: they raise an error, or mark sequences invalid whose entries can not
    be read without waiting."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.invalid: Array | None = None

    def require(self, good: Array, message: str) -> None:
        """Raise an error, or mark sequences invalid, where `good` (b,) is False."""
        xp = namespace(good)
        if is_traced(good) or device_of(good) != "cpu":
            invalid = xp.logical_not(good)
            self.invalid = invalid if self.invalid is None else self.invalid | invalid
        elif not bool(xp.all(good)):
            i = next(i for i in range(good.shape[0]) if not bool(good[i, ...]))
            raise ValueError(f"{self.owner}: {message} (sequence {i} of the batch)")


def check_lengths(
    owner: str, lengths: Given, like: Array, b: int, longest: int, letter: str, checks: ValueChecks
) -> Array | None:
    if lengths is None:
        return None
    xp = namespace(like)
    within = f"lengths must lie between 0 and {letter} = {longest}"
    if isinstance(lengths, list | tuple):
        lengths = whole_numbers(f"{owner}: lengths", lengths)
        checks.require(np.asarray([0 <= n <= longest for n in lengths], dtype=bool), within)
        lengths = xp.asarray(lengths, dtype=xp.int32, **placement(like))
    lengths = check_mask(owner, "lengths", lengths, like, (b,), INTEGERS, "(b)")
    assert lengths is not None
    # Compared before the cast, which would wrap numbers beyond int32.
    checks.require((lengths >= 0) & (lengths <= longest), within)
    return cast(lengths, xp.int32)


def check_mask(
    owner: str, name: str, mask: Given, like: Array, shape: Shape, dtypes: Sequence[str], axes: str
) -> Array | None:
    if mask is None:
        return None
    library = library_of(mask)
    if library != library_of(like):
        found = type(mask).__name__ if library is None else f"one of {library}"
        raise TypeError(
            f"{owner}: {name} must be an array of {library_of(like)}, as the inputs; found {found}"
        )
    if tuple(mask.shape) != shape:
        raise ShapeError(
            f"{owner}: {name} is declared {axes}, that is {shape}; found {tuple(mask.shape)}"
        )
    if dtype_name(mask) not in dtypes:
        is_flag = dtypes == ("bool",)
        expected = "dtype bool" if is_flag else "an integer dtype"
        advice = f"; where 0 is masked, write {name} != 0" if is_flag else ""
        raise TypeError(f"{owner}: {name} must have {expected}; found {dtype_name(mask)}{advice}")
    check_device(f"{owner}: {name}", mask, like)
    return mask


def is_contiguous(segment_ids: Array) -> Array:
    """Whether each id of a sequence is in one run: the sorted ids then have as many runs."""
    xp = namespace(segment_ids)

    def runs(ids: Array) -> Array:
        return xp.sum(cast(differs_from_previous(ids), xp.int32), axis=1)

    return runs(segment_ids) == runs(sort(segment_ids, axis=1))


def zero_padding(
    inputs: ByName, declared: Inputs, q_valid: Array | None, k_valid: Array | None
) -> dict[str, Array]:
    """The inputs (or their gradients) with padding set to 0, so that NaN in it does not spread."""
    zeroed = {}
    for name, array in inputs.items():
        pattern = declared[name]
        for letter, valid in (("t", q_valid), ("s", k_valid)):
            if valid is None or letter not in pattern.letters or pattern.is_pairwise:
                continue  # A pairwise entry is masked together with its score.
            shape = [1] * array.ndim
            shape[0], shape[pattern.letters.index(letter)] = valid.shape
            array = zero_where_not(namespace(valid).reshape(valid, tuple(shape)), array)
        zeroed[name] = array
    return zeroed


def nan_where_invalid(out: Array, invalid: Array | None) -> Array:
    """The output, with NaN for sequences whose traced arguments were out of range.

    The output is multiplied by NaN, so that the gradients of these sequences are NaN too.
    """
    if invalid is None:
        return out
    xp = namespace(out)
    is_invalid = xp.reshape(invalid, (-1,) + (1,) * (out.ndim - 1))
    return out * xp.where(is_invalid, float("nan"), xp.ones_like(out))


class Packed(NamedTuple):
    """The segments of a packed call."""

    segment_ids: Array
    """Segment ids (b, s); padding after `cu_seqlens` has its own id. None without segments."""
    on_host: np.ndarray | None = None
    """The segment ids as a NumPy array, if they can be read without waiting for a device."""
    lengths: Array | None = None
    """The number of tokens before that padding (1,), int32; None if there is no padding."""


def segments_of(
    owner: str, masks: Mapping[str, Given], like: Array, b: int, s: int, checks: ValueChecks
) -> Packed:
    """The segments of s keys, given by `segment_ids` or `cu_seqlens`."""
    segment_ids, cu_seqlens = masks["segment_ids"], masks["cu_seqlens"]
    if cu_seqlens is None:
        ids = check_mask(owner, "segment_ids", segment_ids, like, (b, s), INTEGERS, "(b s)")
        if ids is None:
            return Packed(None)
        on_host = host_array(ids) if device_of(ids) == "cpu" else None
        is_good = is_contiguous(ids if on_host is None else on_host)
        checks.require(is_good, "segment_ids must be contiguous: each id in one run")
        return Packed(ids, on_host)
    if segment_ids is not None:
        raise ValueError(f"{owner}: segment_ids and cu_seqlens mean the same: give one of them")
    return packed_by(owner, cu_seqlens, like, b, s, checks)


def packed_by(
    owner: str, borders: Given, like: Array, b: int, s: int, checks: ValueChecks
) -> Packed:
    """The segments given by `cu_seqlens`: non-decreasing integers (n + 1,), from 0 to at most s."""
    name = f"{owner}: cu_seqlens"
    if b != 1:
        raise ShapeError(
            f"{name} divides one row of tokens, so b = 1 is expected; found b = {b} "
            f"(use segment_ids)"
        )
    bounds = _checked_bounds(name, borders, like)
    on_host = bounds if isinstance(bounds, np.ndarray) else host_array(bounds)
    if on_host is not None:
        numbers = on_host.tolist()  # Python's integers do not overflow.
        _check_values(name, numbers, s)
        end, lengths = numbers[-1], None
        if end < s:
            lengths = on_device_of(like, np.asarray([end], dtype=np.int32))
        counts = np.diff([*numbers, s])
        ids = np.repeat(np.arange(len(counts), dtype=np.int32), counts)[None, :]
        return Packed(on_device_of(like, ids), ids, lengths)
    xp = namespace(bounds)
    if dtype_name(bounds) in ("int8", "int16", "uint8", "uint16"):  # s may be too large for it.
        bounds = cast(bounds, xp.int32)
    good = (bounds[0] == 0) & (bounds[-1] <= s) & xp.all(bounds[1:] >= bounds[:-1])
    message = f"cu_seqlens must go from 0 to s = {s} and never decrease"
    checks.require(xp.reshape(good, (1,)), message)
    bounds = cast(bounds, xp.int32)
    ids = xp.searchsorted(bounds[1:], arange_like(s, bounds), side="right")
    segment_ids = on_device_of(like, cast(ids, xp.int32)[None, :])
    return Packed(segment_ids, None, on_device_of(like, bounds[-1:]))


def sequences_between(bounds: Given) -> int:
    """The number of sequences of `cu_seqlens`. Arrays need not have a `len`."""
    return (len(bounds) if isinstance(bounds, list | tuple) else int(bounds.shape[0])) - 1


def _checked_bounds(name: str, bounds: Given, like: Array) -> Array:
    """`given` as a NumPy array or an array of the inputs' library, with checked type and shape."""
    if isinstance(bounds, list | tuple):
        bounds = np.asarray(whole_numbers(name, bounds), dtype=object)
    library = library_of(bounds)
    if library not in ("numpy", library_of(like)):
        libraries = " or ".join(dict.fromkeys(("numpy", str(library_of(like)))))
        found = type(bounds).__name__ if library is None else f"one of {library}"
        raise TypeError(
            f"{name} must be a list of whole numbers or an array of {libraries}; found {found}"
        )
    if dtype_name(bounds) not in (*INTEGERS, "object"):
        raise TypeError(f"{name} must have an integer dtype; found {dtype_name(bounds)}")
    if bounds.ndim != 1 or bounds.shape[0] < 2:
        raise ShapeError(
            f"{name} must have shape (n + 1,) for n sequences; found {tuple(bounds.shape)}"
        )
    if library != "numpy" and not is_traced(bounds) and device_of(bounds) != "cpu":
        check_device(name, bounds, like, " (or give it on the CPU)")
    return bounds


def _check_values(name: str, bounds: list[int], s: int) -> None:
    if bounds[0] != 0:
        raise ValueError(f"{name} must start at 0; found {bounds[0]}")
    for i, (start, stop) in enumerate(pairwise(bounds)):
        if stop < start:
            raise ValueError(
                f"{name} must not decrease; found {stop} after {start} (entry {i + 1})"
            )
    if bounds[-1] > s:
        raise ValueError(f"{name} must end at s = {s} or before; found {bounds[-1]}")
