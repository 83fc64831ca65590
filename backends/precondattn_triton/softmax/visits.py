"""The tiles that a program visits: the inner ones, without a mask, and then those at a border.

A program loops over tiles of COLUMNS tokens between `begin` and `end`. Those from `low` to `high`
are inner (`reach.py`), and whole. So they are read and multiplied without a mask. A second loop
visits the tiles before `low` and from `high` on:

    begin, low, high, end = keys_in_reach(…)
    for phase in tl.static_range(2):
        first, last = visits(begin, low, high, end, phase)
        for visit in range(first, last, COLUMNS):
            start = visited(visit, low, high, phase)

With low = high = begin and only the second phase, one loop visits all tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.tiles import is_token


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
