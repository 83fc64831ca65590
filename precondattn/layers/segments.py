"""Packed sequences in a layer: the index of each token in its segment.

In a layer, positions start at 0 in each segment, convolutions read no rows of other segments, and
the mechanism gets the same segments.
"""

from __future__ import annotations

from typing import NamedTuple

from precondattn.arrays import (
    Array,
    Arrays,
    arange_like,
    as_index,
    host_array,
    namespace,
    on_device_of,
    take_tokens,
)
from precondattn.execution.masks import (
    INTEGERS,
    ValueChecks,
    check_mask,
    is_contiguous,
    packed_by,
)
from precondattn.given import Given


class CallSegments(NamedTuple):
    """The segments of one call."""

    masks: Arrays
    """The argument `segment_ids` or `cu_seqlens` for the mechanism."""
    place: Array
    """The index of each token in its segment (b, t)."""
    valid: Array | None = None
    """False for padding after the last sequence of `cu_seqlens` (b, t); None without it."""


def segments_of(owner: str, segment_ids: Array, cu_seqlens: Given, x: Array) -> CallSegments | None:
    """The segments of x (b, t, width); None if no argument gives segments."""
    if segment_ids is None and cu_seqlens is None:
        return None
    if segment_ids is not None and cu_seqlens is not None:
        raise ValueError(f"{owner}: segment_ids and cu_seqlens mean the same: give one of them")
    b, t = x.shape[:2]
    checks = ValueChecks(owner)
    valid = None
    if cu_seqlens is not None:
        ids, on_host, lengths = packed_by(owner, cu_seqlens, x, b, t, checks)
        masks = {"cu_seqlens": cu_seqlens}
        if lengths is not None:
            valid = arange_like(t, x)[None, :] < lengths[:, None]
    else:
        ids = check_mask(owner, "segment_ids", segment_ids, x, (b, t), INTEGERS, "(b t)")
        on_host, masks = host_array(ids), {"segment_ids": ids}
        good = is_contiguous(ids if on_host is None else on_host)
        checks.require(good, "segment_ids must be contiguous: each id in one run")
    place = _place(ids) if on_host is None else on_device_of(x, _place(on_host))
    return CallSegments(masks, place, valid)


def _place(ids: Array) -> Array:
    """The number of tokens of the same run before each token, for ids (b, t)."""
    xp = namespace(ids)
    index = xp.broadcast_to(arange_like(ids.shape[1], ids)[None, :], tuple(ids.shape))
    is_first = xp.concat([index[:, :1] == 0, ids[:, 1:] != ids[:, :-1]], axis=1)
    firsts = xp.sort(xp.where(is_first, index, ids.shape[1]), axis=1)
    # Not the standard's `cumulative_sum`, which PyTorch's compiler can not follow.
    run = xp.astype(is_first, index.dtype).cumsum(1) - 1
    return index - take_tokens(firsts, as_index(run))
