"""Masks of pairs of tokens: `attn_mask`, an array of all pairs, and `prefix`, a length.

Query i may attend to key j if

    (j ≤ i and i − j < window, or j is in the prefix of its sequence) and attn_mask[…, i, j].

Padding and other segments stay masked. A prefix consists of the first tokens of a sequence or a
segment. It is stored as a position for each query, before which the query sees all keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from precondattn.algebra.declaration import ShapeError, Sizes
from precondattn.algebra.piece import Piece
from precondattn.arrays import (
    Array,
    arange_like,
    as_index,
    cast,
    differs_from_previous,
    dtype_name,
    host_array,
    library_of,
    namespace,
    on_device_of,
    running_maximum,
)
from precondattn.cache.integers import whole_numbers
from precondattn.execution.masks import INTEGERS, ValueChecks, check_mask
from precondattn.given import Given

ATTN_MASK, PREFIX = "attn_mask", "prefix"
PAIR_MASKS = (ATTN_MASK, PREFIX)


def check_takes_masks(mechanism: Piece, masks: frozenset[str]) -> None:
    """Raise a ValueError for a mask of pairs that a leaf of the mechanism does not support."""
    for name in PAIR_MASKS:
        if name in masks:
            for leaf in mechanism.program.leaves:
                reason = leaf.refuses_mask(name)
                if reason is not None:
                    raise ValueError(f"{mechanism} takes no {name}: {reason}")


def refuse_divided(owner: str, named: Mapping[str, Given]) -> None:
    """Raise a TypeError for a mask of pairs in a call that is divided between devices."""
    for name in PAIR_MASKS:
        if named.get(name) is not None:
            raise TypeError(f"{owner}: {name} is for calls on one device, which are not divided")


def check_attn_mask(
    owner: str, mask: Given, like: Array, sizes: Sizes, columns: Sequence[int] = ()
) -> Array | None:
    """The checked attn_mask (b or 1, h or 1, t, s), boolean; s may be any of `columns`."""
    if mask is None:
        return None
    b, h, t = sizes["b"], sizes.get("h", 1), sizes["t"] if "t" in sizes else sizes["s"]
    columns = columns or (sizes.get("s", t),)
    found = tuple(mask.shape) if library_of(mask) else ()
    if library_of(mask) != library_of(like):
        return check_mask(owner, ATTN_MASK, mask, like, found, ("bool",), "")  # It raises.
    fits = len(found) == 4 and found[0] in (1, b) and found[1] in (1, h) and found[2] == t
    if not fits or found[3] not in columns:
        s = " or ".join(str(count) for count in dict.fromkeys(columns))
        if isinstance(columns, range):
            s = f"{columns.start} to {columns.stop - 1}"
        raise ShapeError(
            f"{owner}: attn_mask is declared (b or 1, h or 1, t, s), that is ({b} or 1, {h} or 1, "
            f"{t}, {s}); found {found}"
        )
    if dtype_name(mask) not in ("bool", *INTEGERS):  # A mask that is added to scores.
        raise TypeError(
            f"{owner}: attn_mask must have dtype bool; found {dtype_name(mask)}; what is added to "
            f"scores is bias, as in pa.softmax(q, k, v, bias=attn_mask)"
        )
    return check_mask(owner, ATTN_MASK, mask, like, found, ("bool",), "(b or 1, h or 1, t, s)")


def of_slots_and_new(mask: Array, length: Array, t: int, slots: int) -> Array:
    """The columns of a mask for the slots of a cache and t new tokens, from columns by position.

    `length` (b,) has the numbers of cached tokens. The columns of empty slots are arbitrary.
    """
    xp, last = namespace(mask), mask.shape[3] - 1
    new = length[:, None] + arange_like(t, length)[None, :]
    of_slots = xp.broadcast_to(arange_like(slots, length)[None, :], (length.shape[0], slots))
    column = xp.clip(xp.concat([of_slots, new], axis=1), min=0, max=last)
    mask = xp.broadcast_to(mask, (length.shape[0], *mask.shape[1:]))
    return xp.take_along_axis(mask, as_index(column)[:, None, None, :], axis=3)


def check_prefix(
    owner: str, prefix: Given, like: Array, count: int, letter: str, checks: ValueChecks
) -> Array | None:
    """The checked prefix lengths of `count` sequences, as int32."""
    if prefix is None:
        return None
    xp, negative = namespace(like), "prefix must not be negative"
    if isinstance(prefix, list | tuple):
        numbers = np.asarray(whole_numbers(f"{owner}: prefix", prefix), dtype=np.int32)
        prefix = on_device_of(like, numbers)
    prefix = check_mask(owner, PREFIX, prefix, like, (count,), INTEGERS, f"({letter})")
    assert prefix is not None
    good = prefix >= 0
    # Each sequence of a packed row has a prefix; the row is valid if all of them are.
    checks.require(good if letter == "b" else xp.all(good, keepdims=True), negative)
    return cast(prefix, xp.int32)


def prefix_of_queries(prefix: Array, t: int, s: int, segment_ids: Array | None) -> Array:
    """The position before which each query (b, t) sees all keys of its segment.

    `prefix` is (b,), or (b, s) if the tokens of a row have different prefixes.
    """
    xp = namespace(prefix)
    length = prefix[:, None] if prefix.ndim == 1 else prefix
    if segment_ids is not None:
        is_first = differs_from_previous(segment_ids)
        position = arange_like(s, prefix)[None, :]
        length = length + running_maximum(xp.where(is_first, position, 0), axis=1)
    whole = xp.broadcast_to(length, (prefix.shape[0], s if segment_ids is not None else t))
    return cast(whole[:, whole.shape[1] - t :], xp.int32)


def prefix_of_packed(prefix: Array, segment_ids: Array) -> Array:
    """The prefix length for each token (1, s), from `prefix` (n,) of n packed sequences.

    `segment_ids` are the indices 0, …, n − 1 of the sequences, and n at padding, where the result
    is 0.
    """
    xp = namespace(prefix)
    of_each = xp.concat([prefix, xp.zeros_like(prefix[:1])])
    return xp.take(of_each, as_index(segment_ids[0, :]), axis=0)[None, :]


def check_extends_prefix(prefix: Array, length: Array, count: Given, checks: ValueChecks) -> None:
    """Raise an error unless a prefix is all new, or all in the cache."""
    # All three are read only if that does not wait for a device.
    on_host = [host_array(a) if not isinstance(a, int) else a for a in (prefix, length, count)]
    if all(a is not None for a in on_host):
        prefix, length, count = (np.asarray(a) for a in on_host)
    is_new = (length == 0) & (prefix <= count)
    message = "prefix must be within the new tokens of an empty cache, or within the cached ones"
    checks.require(is_new | (prefix <= length), message)
