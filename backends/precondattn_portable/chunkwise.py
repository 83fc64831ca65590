"""The recurrence in chunks of tokens: `recurrent` and `recurrent_vjp` as products of matrices.

No loop runs over the tokens of a chunk; only the state is passed from chunk to chunk. Chunks are
processed in groups that fit a cache, and everything but the state is computed for a group at once.
Besides inputs, outputs and their gradients, memory holds one state per chunk, and in the gradient a
few copies of what is written to the state. Queries need no more than a group at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from precondattn.arrays import Array, is_traced, namespace
from precondattn.spec.recurrence import ByTokens, Stream, StreamGradients
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.chunkwise_additive import (
    ChunkGroup,
    HeadAdditive,
    KeyAdditive,
    ValueAdditive,
    WrittenChunks,
)
from precondattn_portable.chunkwise_delta import DeltaRule, KeyDeltaRule
from precondattn_portable.layout import blocks, budget, padded

REREAD = 2
"""Groups that are read repeatedly are smaller by this factor, so that their arrays fit a cache."""

GroupKind = Callable[..., ChunkGroup]
"""A class that computes a group of chunks."""


class Chunkwise:
    """A `Form` of the recurrence (`precondattn.spec.recurrence`).

    `kept_after` has n numbers of chunks. The states after these chunks are returned with the final
    states, as (b (n + 1), m, d, e), where the states of one sequence are adjacent.
    """

    def __init__(
        self, ops: Arithmetic, chunk: int | None = None, kept_after: Sequence[int] = ()
    ) -> None:
        self.ops, self.chunk = ops, ops.sizes.chunk if chunk is None else chunk
        self.kept_after = kept_after

    def work(self, x: Stream) -> ChunkWork:
        """A stream in chunks."""
        return ChunkWork(self.ops, x, self.chunk)

    def forward(self, x: Stream, state: Array) -> tuple[Array, Array]:
        (o,), (final,) = self.read([(x, state)], lambda o: (o,))
        return o, final

    def read(
        self, streams: Sequence[tuple[Stream, Array]], function: ByTokens, *arrays: Array
    ) -> tuple[tuple[Array, ...], list[Array]]:
        works = [self.work(x) for x, _ in streams]
        work, lasts = works[0], [_joined(state) for _, state in streams]
        queries = [x.q for x, _ in streams]
        outs: list[Array] = []
        kept: list[list[Array]] = [[] for _ in works]
        for part in work.parts(max(work.widest for work in works)):
            kept_columns = [n - part.start for n in self.kept_after if part.start < n <= part.stop]
            outputs, lasts = _read(works, part, queries, lasts, kept_columns, kept)
            if part.stop > work.first_read:
                result = function(*outputs, *(work.of_reads(array, part) for array in arrays))
                outs = outs or [None] * len(result)
                filled = partial(work.filled, work.first_read, part)
                outs = [filled(out, tokens) for out, tokens in zip(outs, result, strict=True)]
        finals = [
            _with_kept(rows, last, state)
            for rows, last, (_, state) in zip(kept, lasts, streams, strict=True)
        ]
        return tuple(work.tokens(out, queries[0].shape[2]) for out in outs), finals

    def reread(
        self, x: Stream, state: Array, function: Callable[..., Array], *arrays: Array
    ) -> tuple[Array, Array]:
        """function(read, *arrays) for one group of chunks after another, and the final state.

        `arrays` belong to the queries' tokens, and x has no queries. read(q) returns the outputs of
        queries q in the layout of the group, (c, n, C, r, w).
        """
        work = self.work(x._replace(q=arrays[0]))
        last, out = _joined(state), None
        for part in work.parts(REREAD * work.widest):
            group = work.group(part)
            states = group.states(last)
            last = states[-1, ...] + 0
            if part.stop > work.first_read:
                reads = (work.of_reads(array, part) for array in arrays)
                result = function(partial(group.read, states=states), *reads)
                out = work.filled(work.first_read, part, out, result)
        out = work.tokens(out, arrays[0].shape[2])
        return out, namespace(last).reshape(last, state.shape)

    def by_tokens(self, function: ByTokens, *arrays: Array, axis: int = 2) -> tuple[Array, ...]:
        """Apply a function to a few tokens at a time, so that its temporary results fit a cache."""
        t = arrays[0].shape[axis]
        largest = max(math.prod(array.shape) for array in arrays)
        step = max(t * budget(self.ops.sizes.token_entries) // largest, 1)
        results: tuple[Array, ...] = ()
        for i0, i1 in blocks(t, step):
            index = (*(slice(None),) * axis, slice(i0, i1))
            part_results = function(*(array[(*index, ...)] for array in arrays))
            if i1 == t and not i0:
                return part_results
            results = results or tuple(
                self.ops.time_first((*a.shape[:axis], t, *a.shape[axis + 1 :]), a, axis)
                for a in part_results
            )
            for result, part in zip(results, part_results, strict=True):
                result[(*index, ...)] = part
        return results

    def vjp(self, x: Stream, state: Array, d_o: Array, d_final: Array) -> StreamGradients:
        xp = namespace(state)
        work = self.work(x)
        done: list[tuple[range, ChunkGroup, Array]] = []
        last = _joined(state)
        for part in work.parts(work.widest):
            group = work.group(part)
            states = group.states(last)
            last = states[-1, ...]
            done.append((part, group, states))

        d_q, d_written = None, [None] * len(work.written)
        first = _joined(d_final)
        while done:
            part, group, states = done.pop()
            q, d_outputs = work.of_reads(x.q, part), work.of_reads(d_o, part)
            d_states = group.d_states(q, d_outputs, first)
            first = d_states[0, ...]
            part_d_q, result = group.vjp(q, d_outputs, states, d_states)
            if part.stop > work.first_read:
                d_q = work.filled(work.first_read, part, d_q, part_d_q)
            d_written = [
                None if tokens is None else work.filled(0, part, whole, tokens)
                for whole, tokens in zip(d_written, result, strict=True)
            ]
        s = x.k.shape[2]
        written = (None if a is None else work.tokens(a, s) for a in d_written)
        stream = Stream(work.tokens(d_q, x.q.shape[2]), *written)
        d_beta = None if stream.beta is None else stream.beta[..., 0]
        stream = stream._replace(g=xp.reshape(stream.g, x.g.shape), beta=d_beta)
        return StreamGradients(stream, xp.reshape(first, d_final.shape))


def _read(
    works: list[ChunkWork],
    part: range,
    queries: list[Array],
    lasts: list[Array],
    among: Sequence[int],
    kept: list[list[Array]],
) -> tuple[list[Array], list[Array]]:
    """The reads of a group of chunks, and the states after it; frees its memory on return.

    The states after the chunks `among` are added to `kept`.
    """
    outputs, after = [], []
    chunks: dict[object, Array] = {}  # Arrays that several streams share are divided once.
    for work, q, last, rows in zip(works, queries, lasts, kept, strict=True):
        group = work.group(part, chunks)
        states = group.states(last)
        rows.extend(states[n, ...] + 0 for n in among)
        if part.stop > work.first_read:
            outputs.append(group.read(work.of_reads(q, part), states))
        after.append(states[-1, ...] + 0)
    return outputs, after


def _joined(state: Array) -> Array:
    """States (b, m, d, e) as (n, d, e), with the heads of all sequences on one axis."""
    b, m, d, e = state.shape
    return namespace(state).reshape(state, (b * m, d, e))


def _with_kept(kept: Sequence[Array], last: Array, state: Array) -> Array:
    """The last states in the shape of the first one, each after the kept states of its sequence."""
    xp, (b, *rest) = namespace(last), state.shape
    if not kept:
        return xp.reshape(last, state.shape)
    rows = xp.reshape(xp.stack([*kept, last]), (len(kept) + 1, b, *rest))
    return xp.reshape(xp.permute_dims(rows, (1, 0, 2, 3, 4)), (-1, *rest))


class ChunkWork:
    """A stream in chunks and groups of chunks. Results are collected as (b, t, m, …)."""

    def __init__(self, ops: Arithmetic, x: Stream, chunk: int) -> None:
        xp, self.ops = namespace(x.k), ops
        self.b, self.m, self.s = x.k.shape[:3]
        self.size = min(chunk, 1 << (self.s - 1).bit_length())
        self.count = -(-self.s // self.size)
        self.first_read = (self.s - x.q.shape[2]) // self.size
        """The first chunk with a query."""
        self.widest = max(x.k.shape[3], x.v.shape[3], self.size)
        beta = None if x.beta is None else x.beta[..., None]
        self.written = WrittenChunks(x.k, x.v, x.g, beta, x.erase, x.undecayed)
        self.kind = kind_of(x)
        # Streams without decay get a decay of zeros. An accelerator's entries are not read.
        unread = is_traced(x.g) or ops.sizes.few_operations
        self.decays = max(x.g.shape[3:]) > 1 or unread or bool(xp.any(x.g != 0))

    def parts(self, widest: int) -> Iterator[range]:
        """The groups, as ranges of chunks; one of them begins at the first chunk with a query."""
        step = max(self.ops.sizes.chunk_entries // (self.b * self.m * self.size * widest), 1)
        for low, high in ((0, self.first_read), (self.first_read, self.count)):
            for start in range(low, high, step):
                yield range(start, min(start + step, high))

    def group(self, part: range, known: dict[object, Array] | None = None) -> ChunkGroup:
        """One group. `known` has what streams share, by the identity of an array: its chunks, and
        the decay of such gates. It is extended."""
        known = {} if known is None else known
        arrays = self.written if self.decays else self.written._replace(g=None)
        for array in arrays:
            if array is not None and id(array) not in known:
                chunks = self._chunks(array, part, 0)
                if array is arrays.g:  # The decays of rows or columns are its last axis.
                    chunks = namespace(chunks).reshape(chunks, (*chunks.shape[:3], -1))
                known[id(array)] = chunks
        written = WrittenChunks(*(a if a is None else known[id(a)] for a in arrays))
        group = self.kind(self.ops, written, known.get(("decay", id(arrays.g))))
        known["decay", id(arrays.g)] = group.decay
        return group

    def of_reads(self, queries: Array, part: range) -> Array:
        """Queries of the last t tokens, or cotangents, as (c, n, C, r, w); 0 for earlier tokens."""
        return self._chunks(queries, part, self.s - queries.shape[2])

    def _chunks(self, x: Array, part: range, missing: int) -> Array:
        """An array (b, m, s, …) as (c, n, C, …), 0 at `missing` tokens before and at padding."""
        xp, rest, count = namespace(x), x.shape[3:], len(part) * self.size
        start = part.start * self.size - missing
        low, high = (min(max(token, 0), x.shape[2]) for token in (start, start + count))
        before = min(max(-start, 0), count)
        tokens = padded(x[:, :, low:high, ...], before, count - before - (high - low))
        tokens = xp.reshape(tokens, (self.b, self.m, len(part), self.size, *rest))
        result = self.ops.empty((len(part), self.b, self.m, self.size, *rest), x)
        result[...] = xp.permute_dims(tokens, (2, 0, 1, *range(3, tokens.ndim)))
        return xp.reshape(result, (len(part), self.b * self.m, self.size, *rest))

    def filled(self, first: int, part: range, whole: Array | None, tokens: Array) -> Array:
        """The array (b, t, m, …) of tokens of chunks from `first` on, with those of a group.

        They are written to `whole`, or to a new array if that is None.
        """
        xp, rest = namespace(tokens), tokens.shape[3:]
        if whole is None:
            shape = (self.b, self.s - first * self.size, self.m, *rest)
            whole = self.ops.empty(shape, tokens)
        tokens = xp.reshape(tokens, (len(part), self.b, self.m, self.size, *rest))
        tokens = xp.permute_dims(tokens, (1, 0, 3, 2, *range(4, tokens.ndim)))
        low, full = (part.start - first) * self.size, min(part.stop, self.s // self.size)
        count = (full - part.start) * self.size
        # This reshapes to a view, since only the axis of tokens is split.
        chunks = xp.reshape(
            whole[:, low : low + count, ...], (self.b, -1, self.size, self.m, *rest)
        )
        chunks[...] = tokens[:, : full - part.start, ...]
        if full < part.stop:
            whole[:, low + count :, ...] = tokens[:, -1, : self.s % self.size, ...]
        return whole

    def tokens(self, whole: Array, t: int) -> Array:
        """The last t tokens of an array (b, tokens, m, …), as (b, m, t, …)."""
        tokens = whole[:, whole.shape[1] - t :, ...]
        return namespace(whole).permute_dims(tokens, (0, 2, 1, *range(3, tokens.ndim)))


def kind_of(x: Stream) -> GroupKind:
    """The class that computes the chunks of a stream, by its decays and its rule."""
    rows, columns = x.g.shape[3:]
    if min(rows, columns) > 1 or (x.beta is not None and columns > 1):
        raise ValueError(
            "the chunkwise form has one decay for each head or key channel, or, where values are "
            f"added, one for each value channel; found {rows} x {columns} decays"
        )
    if x.beta is not None:
        return KeyDeltaRule if rows > 1 else DeltaRule
    return KeyAdditive if rows > 1 else ValueAdditive if columns > 1 else HeadAdditive
