"""Inner tiles, all of whose pairs may attend, and tiles at a border, which need a mask.

A program loops over tiles of COLUMNS tokens between `begin` and `end`. Those from `low` to `high`
are inner: before the diagonal, within the segment that all tokens of the program share, and whole.
So they are read and multiplied without a mask. With a window, the ranges are those of `reach.py`. A
second loop visits the tiles before `low` and from `high` on:

    begin, low, high, end = tiles_of_keys(…)
    for phase in tl.static_range(2):
        first, last = visits(begin, low, high, end, phase)
        for visit in range(first, last, COLUMNS):
            start = visited(visit, low, high, phase)

Keys that are not valid are a matter of the caller: a query gradient masks them in every tile, and a
key gradient in its result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.softmax.reach import keys_in_reach, queries_in_reach
from precondattn_triton.tiles import addresses, is_token, keys_met, load_tile, queries_met


@triton.jit
def tiles_of_keys(
    first, count, batch, t, s, segment, window, CAUSAL: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """`begin`, `low`, `high` and `end` of the keys that `count` queries from `first` on visit."""
    if window is None:
        begin, end = keys_met(first, count, batch, t, s, segment, CAUSAL)
        begin = begin // COLUMNS * COLUMNS
        low, high = inner_keys(first, count, batch, t, s, segment, CAUSAL, COLUMNS)
    else:
        begin, low, high, end = keys_in_reach(
            first, count, batch, t, s, None, segment, window, CAUSAL, COLUMNS
        )
    return begin, low, high, end


@triton.jit
def tiles_of_queries(
    first, count, batch, t, s, segment, window, CAUSAL: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """`begin`, `low`, `high` and `end` of the queries that `count` keys from `first` on visit."""
    if window is None:
        begin, end = queries_met(first, count, batch, t, s, segment, CAUSAL)
        begin = begin // COLUMNS * COLUMNS
        low, high = inner_queries(first, count, batch, t, s, segment, CAUSAL, COLUMNS)
    else:
        begin, low, high, end = queries_in_reach(
            first, count, batch, t, s, segment, window, CAUSAL, COLUMNS
        )
        # An inner tile is whole, also where t ends.
        high = tl.maximum(tl.minimum(high, t // COLUMNS * COLUMNS), low)
    return begin, low, high, end


@triton.jit
def inner_keys(
    first, count, batch, t, s, segment, CAUSAL: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """The tiles of keys, from `low` to `high`, that all of `count` queries from `first` on see."""
    position, last = first + (s - t), tl.minimum(first + count, t) - 1 + (s - t)
    low, high = 0, s
    if CAUSAL:
        high = tl.minimum(position + 1, s)
    if segment is not None:
        low, high = _shared(segment, batch, s, position, last, high)
    return _whole_tiles(low, high, COLUMNS)


@triton.jit
def inner_queries(
    first, count, batch, t, s, segment, CAUSAL: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """The tiles of queries, from `low` to `high`, that see all of `count` keys from `first` on."""
    last = tl.minimum(first + count, s) - 1
    low, high = 0, s
    if segment is not None:
        low, high = _shared(segment, batch, s, first, last, high)
    if CAUSAL:
        low = tl.maximum(low, last)
    if CAUSAL or segment is not None:
        low -= s - t
        high -= s - t
    else:
        high = t
    return _whole_tiles(low, high, COLUMNS)


@triton.jit
def _shared(segment, batch, s, first, last, high):
    """The tokens before `high` in the segment of both tokens; none if those are in two."""
    begins = segment + batch * 2 * s
    is_present = first >= 0
    low = tl.load(begins + tl.maximum(last, 0))
    end = tl.load(begins + s + tl.maximum(first, 0))
    return low, tl.where(is_present, tl.minimum(high, end), 0)


@triton.jit
def _whole_tiles(low, high, COLUMNS: tl.constexpr):
    """The first and the last + 1 token of the whole tiles within `low` and `high`, if any."""
    low = tl.cdiv(tl.maximum(low, 0), COLUMNS) * COLUMNS
    return low, tl.maximum(tl.maximum(high, 0) // COLUMNS * COLUMNS, low)


@triton.jit
def visits(begin, low, high, end, phase: tl.constexpr):
    """The limits of the loop over inner tiles, and, in the second phase, of that over the rest."""
    if phase == 0:
        return low, high
    return begin + (high - low), end


@triton.jit
def visited(visit, low, high, phase: tl.constexpr):
    """The first token of a tile that is visited."""
    if phase == 0:
        return visit
    return tl.where(visit < high, visit - (high - low), visit)


@triton.jit
def is_visited(valid, batch, tokens, count, IS_WHOLE: tl.constexpr):
    """Whether tokens exist and are valid; no mask for a whole tile, if all tokens are valid."""
    if IS_WHOLE and valid is None:
        return tl.full(tokens.shape, True, tl.int1)
    return is_token(valid, batch, tokens, count)


@triton.jit
def load_visited(
    start, valid, batch, tokens, count, token_stride, channel_stride,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """A tile as `load_tile` reads it, without a mask where all tokens exist and are valid."""
    if IS_WHOLE and valid is None:
        channels = tl.arange(0, PADDED)
        at = addresses(start, tokens, token_stride, channels, channel_stride)
        if WIDTH == PADDED:
            return tl.load(at)
        return tl.load(at, mask=(channels < WIDTH)[None, :], other=0.0)
    is_present = is_token(valid, batch, tokens, count)
    return load_tile(start, tokens, is_present, token_stride, channel_stride, WIDTH, PADDED)


@triton.jit
def tokens_again(tile, ROWS: tl.constexpr):
    """The tokens of a program's tile, for what it does after its loops.

    The second axis of the grid has one program, 0, which the compiler does not know. So it computes
    the addresses anew, and does not keep those of the inputs in registers through the loops.
    """
    return (tile + tl.program_id(1)) * ROWS + tl.arange(0, ROWS)
