"""The interval of keys that a query attends to, and the tiles of a loop, inner ones first.

A query at position i of the keys attends to the keys j of its segment with

    |i − j| < window,    and j ≤ i in a causal call.

These are an interval, low ≤ j < high, and so are the queries that attend to a key. Its ends are
computed once for each row, before the loop, and a mask is two comparisons for each pair.

Neither end falls from one row to the next. So the ends of the first and the last row of a tile say
which keys any of its rows meets, and which keys all of them attend to, the inner range:

    first low   |   last low … first high   |   last high

Tiles within the inner range need no mask. The other tiles, at a border, are those before and after:

    begin, low, high, end = keys_in_reach(…)
    for phase in tl.static_range(2):
        first, last = visits(begin, low, high, end, phase)
        for visit in range(first, last, COLUMNS):
            start = visited(visit, low, high, phase)

With low = high = begin and only the second phase, one loop visits all tiles.

Keys and queries that are not valid are a matter of the caller: a query gradient masks invalid keys
in every tile, and a key gradient in its result. `masks`, `options` and `sizes` are those of a call
(`softmax_forward.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.tiles import is_token


@triton.jit
def keys_of(query, batch, masks, scoring, sizes, CAUSAL: tl.constexpr):
    """The first key that a query attends to, and the last + 1.

    They have the shape of `query`, but for a first key of 0, without a window and segments.
    """
    # Triton 3.6 can not return None in its place.
    low, high = 0, sizes.s
    position = query + (sizes.s - sizes.t)
    if CAUSAL:
        high = position + 1
    if scoring.window is not None:
        low = tl.maximum(position - scoring.window + 1, 0)
        if not CAUSAL:
            high = tl.minimum(position + scoring.window, sizes.s)
    if masks.segment is not None:
        begins = masks.segment + batch * 2 * sizes.s
        present = tl.minimum(tl.maximum(position, 0), sizes.s - 1)
        low = tl.maximum(low, tl.load(begins + present))
        end = tl.load(begins + sizes.s + present)
        high = tl.minimum(high, tl.where(position >= 0, end, 0))
    return low, high


@triton.jit
def queries_of(key, batch, masks, scoring, sizes, CAUSAL: tl.constexpr):
    """The first query that attends to a key, and the last + 1.

    They have the shape of `key`, but for a first query of 0 or a last of t.
    """
    low, high = 0, sizes.t
    query = key - (sizes.s - sizes.t)
    if CAUSAL:
        low = tl.maximum(query, 0)
    if scoring.window is not None:
        high = tl.minimum(query + scoring.window, sizes.t)
        if not CAUSAL:
            low = tl.maximum(query - scoring.window + 1, 0)
    if masks.segment is not None:
        begins = masks.segment + batch * 2 * sizes.s
        present = tl.minimum(key, sizes.s - 1)
        low = tl.maximum(low, tl.load(begins + present) - (sizes.s - sizes.t))
        high = tl.minimum(high, tl.load(begins + sizes.s + present) - (sizes.s - sizes.t))
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
    row, column, is_key, batch, masks, scoring, sizes, CAUSAL: tl.constexpr
):  # fmt: skip
    """The attention mask: query `row` of t may attend to key `column` of s. Shapes broadcast."""
    low, high = keys_of(row, batch, masks, scoring, sizes, CAUSAL)
    has_first: tl.constexpr = scoring.window is not None or masks.segment is not None
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
    first, count, batch, masks, scoring, sizes, CAUSAL: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """The first key of `count` queries from `first` on, the inner range of keys, their end."""
    last = tl.minimum(first + count, sizes.t) - 1
    low, inner_high = keys_of(first, batch, masks, scoring, sizes, CAUSAL)
    inner_low, high = keys_of(last, batch, masks, scoring, sizes, CAUSAL)
    # The end is at most s. If the compiler knows it, a loop does not compare each key with s.
    high = tl.minimum(high, sizes.s)
    return _of_whole_tiles(low, inner_low, inner_high, high, SIZE)


@triton.jit
def queries_in_reach(
    first, count, batch, masks, scoring, sizes, CAUSAL: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """The first query of `count` keys from `first` on, the inner range of queries, their end."""
    last = tl.minimum(first + count, sizes.s) - 1
    low, inner_high = queries_of(first, batch, masks, scoring, sizes, CAUSAL)
    inner_low, high = queries_of(last, batch, masks, scoring, sizes, CAUSAL)
    return _of_whole_tiles(low, inner_low, inner_high, high, SIZE)


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
def tokens_again(tile, ROWS: tl.constexpr):
    """The tokens of a program's tile, for what it does after its loops.

    The second axis of the grid has one program, 0, which the compiler does not know. So it computes
    the addresses anew, and does not keep those of the inputs in registers through the loops.
    """
    return (tile + tl.program_id(1)) * ROWS + tl.arange(0, ROWS)
