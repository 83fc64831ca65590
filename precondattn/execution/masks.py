"""The masks of a call: `lengths`, `key_mask` and `segment_ids` are checked, and padding is zeroed.

Some conditions depend on the entries of arrays: a length out of range, segments that are not
contiguous. They raise an error, unless the arrays are traced. Then these sequences are marked
invalid, and their output is NaN, so that it can not be mistaken for a result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from precondattn.algebra.declaration import Inputs, ShapeError
from precondattn.arrays import (
    Array,
    cast,
    dtype_name,
    is_traced,
    library_of,
    namespace,
    placement,
    zero_where_not,
)
from precondattn.cache.integers import whole_numbers
from precondattn.execution.array_checks import check_device
from precondattn.given import Given

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


class ValueChecks:
    """Conditions on entries of arrays: an error, or an invalid sequence if the array is traced."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.invalid: Array | None = None

    def require(self, good: Array, message: str) -> None:
        """`good` (b,) must hold for every sequence."""
        xp = namespace(good)
        if not is_traced(good):
            if not bool(xp.all(good)):
                self.require_now((bool(good[i, ...]) for i in range(good.shape[0])), message)
            return
        invalid = xp.logical_not(good)
        self.invalid = invalid if self.invalid is None else self.invalid | invalid

    def require_now(self, good: Iterable[bool], message: str) -> None:
        """As `require`, for Python booleans."""
        for i, is_good in enumerate(good):
            if not is_good:
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
        outside = [i for i, n in enumerate(lengths) if not 0 <= n <= longest]
        if outside:
            raise ValueError(f"{owner}: {within} (sequence {outside[0]} of the batch)")
        lengths = xp.asarray(lengths, dtype=xp.int32, **placement(like))
    lengths = check_mask(owner, "lengths", lengths, like, (b,), INTEGERS, "(b)")
    assert lengths is not None
    # Compared before the cast, which would wrap numbers beyond int32.
    checks.require((lengths >= 0) & (lengths <= longest), within)
    return cast(lengths, xp.int32)


def check_mask(
    owner: str,
    name: str,
    mask: Array | None,
    like: Array,
    shape: tuple[int, ...],
    dtypes: Sequence[str],
    pattern: str,
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
            f"{owner}: {name} is declared {pattern}, that is {shape}; found {tuple(mask.shape)}"
        )
    if dtype_name(mask) not in dtypes:
        expected = "dtype bool" if dtypes == ("bool",) else "an integer dtype"
        raise TypeError(f"{owner}: {name} must have {expected}; found {dtype_name(mask)}")
    check_device(f"{owner}: {name}", mask, like)
    return mask


def is_contiguous(segment_ids: Array) -> Array:
    """Per sequence, whether each id is in one run: the sorted ids then have as many runs."""
    xp = namespace(segment_ids)

    def runs(ids: Array) -> Array:
        return xp.sum(cast(ids[:, 1:] != ids[:, :-1], xp.int32), axis=1)

    return runs(segment_ids) == runs(xp.sort(segment_ids, axis=1))


def zero_padding(
    inputs: Mapping[str, Array], declared: Inputs, q_valid: Array | None, k_valid: Array | None
) -> dict[str, Array]:
    """The inputs (or their gradients) with padding set to 0, so that NaN padding does not spread.

    q_valid (b, t) applies to the time axis of queries, k_valid (b, s) to that of keys.
    """
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
    """The output, NaN for sequences whose traced arguments were out of range.

    NaN is multiplied in, so that the gradients of those sequences are NaN too.
    """
    if invalid is None:
        return out
    xp = namespace(out)
    is_invalid = xp.reshape(invalid, (-1,) + (1,) * (out.ndim - 1))
    return out * xp.where(is_invalid, float("nan"), xp.ones_like(out))
