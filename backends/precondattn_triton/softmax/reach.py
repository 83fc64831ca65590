"""Which tiles of keys a tile of queries meets, and which of them need a mask; and the converse.

A query at position i of the keys attends to the keys j of its segment with

    |i − j| < window,    and j ≤ i in a causal call.

Positions of a tile are consecutive, so the keys that its queries meet are a range, and those that
all its queries attend to are a range within. Tiles within the inner range are computed without a
mask. The other tiles of the outer range, its edges, are the tiles before and after:

    ⌊low⌋ … ⌈open low⌉   |   open low … open high   |   ⌊open high⌋ … high

If packed segments end within the tile, or if keys are masked one by one, the inner range is empty.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.tiles import keys_met, may_attend, queries_met


@triton.jit
def may_attend_within(
    row, column, is_key, batch, t, s, segment, window, CAUSAL: tl.constexpr
):  # fmt: skip
    """The attention mask: query `row` of t may attend to key `column` of s. Shapes broadcast."""
    mask = may_attend(row, column, is_key, batch, t, s, segment, CAUSAL)
    if window is not None:
        behind = row + (s - t) - column
        mask = mask & (behind < window)
        if not CAUSAL:
            mask = mask & (behind > -window)
    return mask


@triton.jit
def _segment_of(first, count, batch, s, segment):
    """The segment of `count` tokens, as its first token and its end; empty if there are several."""
    begins = segment + batch * 2 * s
    last = tl.minimum(tl.maximum(first + count, 1), s) - 1
    present = tl.minimum(tl.maximum(first, 0), s - 1)
    begin = tl.load(begins + present)
    is_one = (begin == tl.load(begins + last)) & (first >= 0)
    return begin, tl.where(is_one, tl.load(begins + s + present), begin)


@triton.jit
def _of_whole_tiles(low, high, open_low, open_high, SIZE: tl.constexpr):
    """The start, the open range and the end, of which all but the end are multiples of SIZE."""
    begin = low // SIZE * SIZE
    open_low = (open_low + SIZE - 1) // SIZE * SIZE
    open_high = tl.maximum(tl.minimum(open_high, high), 0) // SIZE * SIZE
    is_open = open_low < open_high
    return (
        begin,
        tl.where(is_open, open_low, begin),
        tl.where(is_open, open_high, begin),
        tl.maximum(high, begin),
    )


@triton.jit
def keys_in_reach(
    first, count, batch, t, s, k_valid, segment, window,
    CAUSAL: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """For `count` queries from `first` on: the first key, the open range, and the end."""
    low, high = keys_met(first, count, batch, t, s, segment, CAUSAL)
    position = first + (s - t)
    open_high = s
    if CAUSAL:
        open_high = position + 1
    if window is not None:
        low = tl.maximum(low, position - window + 1)
        if not CAUSAL:
            high = tl.minimum(high, position + count - 1 + window)
            open_high = position + window
    open_low = low
    if window is not None:
        open_low = tl.maximum(low, position + count - window)
    if segment is not None:
        begin, end = _segment_of(position, count, batch, s, segment)
        open_low = tl.maximum(open_low, begin)
        open_high = tl.minimum(open_high, end)
    if k_valid is not None:
        open_high = low
    return _of_whole_tiles(low, high, open_low, open_high, SIZE)


@triton.jit
def queries_in_reach(
    first, count, batch, t, s, segment, window, CAUSAL: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """For `count` keys from `first` on: the first query, the open range, and the end.

    Masks of single keys or queries are not considered, nor are queries past the last one.
    """
    low, high = queries_met(first, count, batch, t, s, segment, CAUSAL)
    query = first - (s - t)
    open_low, open_high = low, tl.cdiv(t, SIZE) * SIZE
    if CAUSAL:
        open_low = query + count - 1
    if window is not None:
        high = tl.minimum(high, query + count - 1 + window)
        open_high = tl.minimum(open_high, query + window)
        if not CAUSAL:
            low = tl.maximum(low, query - window + 1)
            open_low = query + count - window
    if segment is not None:
        begin, end = _segment_of(first, count, batch, s, segment)
        open_low = tl.maximum(open_low, begin - (s - t))
        open_high = tl.minimum(open_high, end - (s - t))
    return _of_whole_tiles(
        low, tl.cdiv(high, SIZE) * SIZE, tl.maximum(open_low, low), open_high, SIZE
    )


@triton.jit
def edges(begin, open_low, open_high, end, SIZE: tl.constexpr):
    """The number of tiles before the open range, and of those before and after it."""
    before = (open_low - begin) // SIZE
    return before, before + tl.cdiv(end - open_high, SIZE)


@triton.jit
def edge(number, before, begin, open_high, SIZE: tl.constexpr):
    """The first token of an edge's tile."""
    return tl.where(
        number < before, begin + number * SIZE, open_high + (number - before) * SIZE
    )  # fmt: skip
