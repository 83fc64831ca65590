"""The interval of keys that a query attends to, and the inner tiles, all of whose pairs may attend.

A query at position i of the keys attends to the keys j of its segment with

    |i − j| < window,    and j ≤ i in a causal call.

These are an interval, low ≤ j < high, and so are the queries that attend to a key. Its ends are
computed once for each row, before the loop, and a mask is two comparisons for each pair.

Neither end falls from one row to the next. So the ends of the first and the last row of a tile say
which keys any of its rows meets, and which keys all of them attend to, the inner range:

    first low   |   last low … first high   |   last high

Tiles within the inner range need no mask. The other tiles, at a border, are those before and after.
Keys and queries that are not valid are a matter of the caller: a query gradient masks invalid keys
in every tile, and a key gradient in its result. `visits.py` has the loops over the tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keys_of(query, batch, t, s, segment, window, CAUSAL: tl.constexpr):
    """The first key that a query attends to, and the last + 1.

    They have the shape of `query`, but for a first key of 0, without window and segments.
    """
    # Triton 3.6 can not return None in its place.
    low, high = 0, s
    position = query + (s - t)
    if CAUSAL:
        high = position + 1
    if window is not None:
        low = tl.maximum(position - window + 1, 0)
        if not CAUSAL:
            high = tl.minimum(position + window, s)
    if segment is not None:
        begins = segment + batch * 2 * s
        present = tl.minimum(tl.maximum(position, 0), s - 1)
        low = tl.maximum(low, tl.load(begins + present))
        end = tl.load(begins + s + present)
        high = tl.minimum(high, tl.where(position >= 0, end, 0))
    return low, high


@triton.jit
def queries_of(key, batch, t, s, segment, window, CAUSAL: tl.constexpr):
    """The first query that attends to a key, and the last + 1.

    They have the shape of `key`, but for a first query of 0 or a last of t.
    """
    low, high = 0, t
    query = key - (s - t)
    if CAUSAL:
        low = tl.maximum(query, 0)
    if window is not None:
        high = tl.minimum(query + window, t)
        if not CAUSAL:
            low = tl.maximum(query - window + 1, 0)
    if segment is not None:
        begins = segment + batch * 2 * s
        present = tl.minimum(key, s - 1)
        low = tl.maximum(low, tl.load(begins + present) - (s - t))
        high = tl.minimum(high, tl.load(begins + s + present) - (s - t))
    return low, high


@triton.jit
def is_within(token, low, high, HAS_LOW: tl.constexpr):
    """Whether low ≤ token < high; the first comparison only with HAS_LOW."""
    mask = token < high
    if HAS_LOW:
        mask = mask & (token >= low)
    return mask


@triton.jit
def may_attend_within(
    row, column, is_key, batch, t, s, segment, window, CAUSAL: tl.constexpr
):  # fmt: skip
    """The attention mask: query `row` of t may attend to key `column` of s. Shapes broadcast."""
    low, high = keys_of(row, batch, t, s, segment, window, CAUSAL)
    has_first: tl.constexpr = window is not None or segment is not None
    return is_within(column, low, high, has_first) & is_key


@triton.jit
def _of_whole_tiles(low, inner_low, inner_high, high, SIZE: tl.constexpr):
    """The start, the inner range and the end, of which all but the end are multiples of SIZE.

    The inner range may be empty, and if no tile is met, the end may be before the start.
    """
    begin = tl.maximum(low, 0) // SIZE * SIZE
    inner_low = tl.cdiv(tl.maximum(inner_low, 0), SIZE) * SIZE
    inner_high = tl.maximum(inner_high, 0) // SIZE * SIZE
    return begin, inner_low, tl.maximum(inner_high, inner_low), high


@triton.jit
def keys_in_reach(
    first, count, batch, t, s, segment, window, CAUSAL: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """The first key of `count` queries from `first` on, the inner range of keys, their end."""
    last = tl.minimum(first + count, t) - 1
    low, inner_high = keys_of(first, batch, t, s, segment, window, CAUSAL)
    inner_low, high = keys_of(last, batch, t, s, segment, window, CAUSAL)
    # The end is at most s. If the compiler knows it, a loop does not compare each key with s.
    high = tl.minimum(high, s)
    return _of_whole_tiles(low, inner_low, inner_high, high, SIZE)


@triton.jit
def queries_in_reach(
    first, count, batch, t, s, segment, window, CAUSAL: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """The first query of `count` keys from `first` on, the inner range of queries, their end."""
    last = tl.minimum(first + count, s) - 1
    low, inner_high = queries_of(first, batch, t, s, segment, window, CAUSAL)
    inner_low, high = queries_of(last, batch, t, s, segment, window, CAUSAL)
    return _of_whole_tiles(low, inner_low, inner_high, high, SIZE)
