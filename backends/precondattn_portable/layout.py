"""The tiling: heads before time, query heads grouped by key head, blocks of rows.

A row block holds the scores of one block of query rows with all keys they may attend to. It is the
largest array in memory, linear in the number of keys. Heads are processed in groups whose row
blocks together fit a cache.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from types import EllipsisType
from typing import NamedTuple

from precondattn.arrays import Array, Index, namespace, placement, zero_where_not
from precondattn.frame import Frame
from precondattn.spec.array_functions import swap_time_and_heads
from precondattn_portable.arithmetic import Arithmetic, Scratch
from precondattn_portable.sizes import BlockSizes


class ThreadShare(threading.local):
    """Per thread: the number of threads that divide a call, and so the memory of each."""

    count = 1


SHARING = ThreadShare()


def budget(entries: int) -> int:
    """This thread's share of the entries that may be processed together."""
    return entries // SHARING.count


Part = tuple[slice, slice, EllipsisType]
"""The index of some sequences and some key heads of (b, n, …)."""

ALL_HEADS: Part = (slice(None), slice(None), ...)


class Tile(NamedTuple):
    """The scores of queries i0 … i1 − 1 and keys low … high − 1."""

    i0: int
    i1: int
    low: int
    high: int

    @property
    def queries(self) -> Index:
        """The index of its queries in (b, h, t, …)."""
        return slice(None), slice(None), slice(self.i0, self.i1), ...

    @property
    def keys(self) -> Index:
        """The index of its keys in (b, n, s, …)."""
        return slice(None), slice(None), slice(self.low, self.high), ...

    def at(self, part: Part) -> Index:
        """The index of its queries of some heads in (b, n, r, t, …)."""
        return (*part[:2], slice(None), slice(self.i0, self.i1), ...)

    def rows_of(self, q: Array, part: Part = ALL_HEADS) -> Array:
        """Its queries of some heads of (b, n, r, t, d), as (b, n, r (i1 − i0), d)."""
        if q.shape[2] == 1:
            return q[(*part[:2], 0, slice(self.i0, self.i1), ...)]
        rows = q[self.at(part)]
        b, n, r, t, d = rows.shape
        return namespace(q).reshape(rows, (b, n, r * t, d))


def grouped_queries(ops: Arithmetic, q: Array, n: int) -> Array:
    """(b, t, h, d) to (b, n, r, t, d): the r query heads that share one of n key/value heads."""
    b, t, h, d = q.shape
    return ops.reshape(ops.heads_first(q), (b, n, h // n, t, d))


def queries_by_key_head(q: Array, n: int) -> Array:
    """(b, 1, h, d) to (b, n, h / n, d): for one token a view."""
    b, _, h, d = q.shape
    return namespace(q).reshape(q, (b, n, h // n, d))


def grouped_bias(bias: Array, n: int) -> Array:
    """(b or 1, h or 1, t, s) to (b or 1, n or 1, r or 1, t, s)."""
    b, heads, *pairs = bias.shape
    groups = (1, 1) if heads == 1 else (n, heads // n)
    return namespace(bias).reshape(bias, (b, *groups, *pairs))


def of_heads(pairs: Array, part: Part) -> Array:
    """The part of `grouped_bias` for some sequences and key heads; axes of one entry are kept."""
    pairs = pairs if pairs.shape[0] == 1 else pairs[part[0], ...]
    return pairs if pairs.shape[1] == 1 else pairs[:, part[1], ...]


def by_query_head(ops: Arithmetic, row_block: Array, queries: int) -> Array:
    """(b, n, r queries, s) to (b, n, r, queries, s)."""
    b, n, rows, s = row_block.shape
    return ops.reshape(row_block, (b, n, rows // queries, queries, s))


def ungrouped(ops: Arithmetic, q: Array) -> Array:
    """(b, n, r, t, d) to (b, t, h, d)."""
    b, n, r, t, d = q.shape
    return ops.swapped(ops.reshape(q, (b, n * r, t, d)))


time_first = swap_time_and_heads
"""(b, h, t, …) to (b, t, h, …)."""


def block_size(sizes: BlockSizes, tokens: int, queries_per_key_head: int = 1) -> int:
    """Positions of a block, whose rows are those of all query heads of a key head."""
    return min(max(sizes.rows // queries_per_key_head, sizes.fewest_rows), tokens)


def blocks(count: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of blocks of `size`, the last one shorter."""
    starts = range(0, count, size)
    return zip(starts, (*starts[1:], count), strict=False)  # Without tokens there is no start.


def head_groups(
    sizes: BlockSizes, b: int, n: int, row_block: int, most: int | None = None
) -> Iterator[Part]:
    """Groups of heads with at most `most` entries, or the usual number; a head has `row_block`."""
    entries = budget(sizes.row_block_entries)
    together = max(min(entries, most or entries) // max(row_block, 1), 1)
    if together >= n:
        for start, stop in blocks(b, together // n):
            yield slice(start, stop), slice(0, n), ...
    else:
        for sequence in range(b):
            for start, stop in blocks(n, together):
                yield slice(sequence, sequence + 1), slice(start, stop), ...


def groups_with_scratch(
    ops: Arithmetic, like: Array, row_block: int, most: int | None = None, *, gradient: bool = False
) -> Iterator[tuple[Part, list[Scratch]]]:
    """Groups of the heads of `like`, and workspace for their row blocks (and those' gradients)."""
    workspaces: list[Scratch] = []
    b, n = like.shape[:2]
    for part in head_groups(ops.sizes, b, n, row_block, most):
        # The first group is the largest.
        entries = math.prod(like[part].shape[:2]) * row_block
        workspaces = workspaces or [ops.scratch(entries, like) for _ in range(1 + gradient)]
        yield part, workspaces


def zero_padding(x: Array, frame: Frame) -> Array:
    """(b, t, h, …) with 0 at padded queries, which attend to nothing."""
    return x if frame.q_valid is None else only_at(frame.q_valid, x)


def only_at(valid: Array | None, x: Array, axis: int = 1) -> Array:
    """x, 0 at tokens that are not valid (b, t). Tokens are axis 1, or 2 if heads come before."""
    if valid is None:
        return x
    rest = (1,) * (x.ndim - axis - 1)
    shape = (valid.shape[0], *(1,) * (axis - 1), valid.shape[1], *rest)
    return zero_where_not(namespace(x).reshape(valid, shape), x)


def tokens_at(low: int, high: int) -> Index:
    """The index of tokens low … high − 1 of (b, n, s, …)."""
    return slice(None), slice(None), slice(low, high), ...


def at_chunk(chunk: int, tokens: slice = slice(None)) -> Index:
    """The index of (some tokens of) a chunk of (b, n, chunks, size, …)."""
    return slice(None), slice(None), chunk, tokens, ...


def padded(x: Array, before: int, after: int, axis: int = 2, value: float = 0) -> Array:
    """x with zeros, or another value, before and after, along the axis of time."""
    if not before and not after:
        return x
    xp = namespace(x)
    fill = {"dtype": x.dtype, **placement(x)}
    first, last = (
        xp.full((*x.shape[:axis], count, *x.shape[axis + 1 :]), value, **fill)
        for count in (before, after)
    )
    return xp.concat([first, x, last], axis=axis)
