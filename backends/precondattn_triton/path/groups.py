"""Groups of queries of PaTH's backward pass, and where their X and Y are stored.

X and Y have a row for each query and each chunk (or block) before it (`carried_queries.py`). Chunks
of L tokens have a parent: the block that they are in; or, if there are no blocks, all tokens. So do
blocks: all tokens. A query in chunk i of its parent has rows for the chunks 0 … i − 1 of it. The
rows of L queries in one chunk, as they enter another, are adjacent. Chunks i of a parent follow one
another, so that i has i (i − 1) / 2 such pieces before it.

A group has as many queries as fit the budget: several whole parents, or a part of one parent.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl  # noqa: F401 (The interpreter looks for it here.)

from precondattn_triton.launching import cdiv

BUDGET = 2**30
"""Bytes of X and Y together, at a time: 1 GiB. This is what all queries of a call of 8,192 tokens
take, for 32 heads of all sequences, 128 channels and 16 bits. A group has at least one block, even
if that takes more. A larger budget saves launches in longer calls only: the bytes that are moved
stay the same."""


class Level(NamedTuple):
    """The chunks of all blocks, or the blocks of the call."""

    length: int
    """L"""
    per_parent: int
    """The number of chunks in a block, or of blocks in the call"""


class QueryGroup(NamedTuple):
    """Queries by their positions among the keys, and the layout of their X, as kernels read it."""

    start: int
    end: int
    before: int
    """The number of chunks in the parent before the group; 0 for whole parents"""
    pairs: int
    """The number of stored pieces of each parent"""
    length: int
    per_parent: int
    stored: int
    """The number of rows of each head"""

    @property
    def parent(self) -> int:
        """The first position of the parent of the first query: of all keys that are entered."""
        return self.start // (self.length * self.per_parent) * self.length * self.per_parent


@triton.jit
def stored_row(position, group):
    """The row of X of the query at a position, as it enters the first chunk of its parent.

    The next chunk of the parent has its row `length` later.
    """
    length = group.length
    chunk = position // length % group.per_parent
    parent = (position - group.start) // (length * group.per_parent)
    # i (i − 1) / 2 less that of `before`, whose own products may be too large for 32 bits.
    piece = (chunk - group.before) * (chunk + group.before - 1) // 2
    return (parent * group.pairs + piece) * length + position % length


def groups(level: Level, past: int, s: int, row_bytes: int) -> list[QueryGroup]:
    """Groups of the queries at positions past … s − 1, in order.

    `row_bytes` are those of a row of X and one of Y, of all heads together.
    """
    length, count = level
    chunks = cdiv(s, length)
    budget = max(BUDGET // (row_bytes * length), 1)
    if chunks > count:
        pairs = count * (count - 1) // 2
        parent, parents = past // (length * count), cdiv(chunks, count)
        step = max(budget // pairs, 1)
        tokens = count * length
        found = []
        for start in range(parent, parents, step):
            end = min(start + step, parents)
            stored = (end - start) * pairs * length
            found.append(QueryGroup(start * tokens, min(end * tokens, s), 0, pairs, *level, stored))
        return found
    found, first = [], past // length
    while first < chunks:
        last, pairs = first + 1, first
        while last < chunks and pairs + last <= budget:
            pairs += last
            last += 1
        group = QueryGroup(
            first * length, min(last * length, s), first, pairs, *level, pairs * length
        )
        found.append(group)
        first = last
    return found
