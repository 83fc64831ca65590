"""Caches: what a sequence has to remember to be continued.

A cache is `Cache(length, store)`: how many tokens each sequence of the batch holds, and buffers
keyed by the value whose history they hold, so that one value is stored once however many pieces
of a mechanism read it. Both are plain tuples and dicts of arrays: pytrees in JAX and PyTorch, and
picklable. The layout belongs to the mechanism, not to a backend: one backend may prefill a cache
and another decode from it.
"""

from __future__ import annotations

from typing import NamedTuple

from precondattn.arrays import (
    HALF,
    Array,
    arange_like,
    cast,
    copied,
    device_of,
    dtype_name,
    library_of,
    namespace,
    placement,
    wants_gradient,
    writes_in_place,
)
from precondattn.declaration import Shape

KEY_MASK = "key_mask"
"""The buffer of which cached keys may be seen; only in a cache that was asked to keep it."""


class Cache(NamedTuple):
    """Tokens per sequence (b,), and buffers by the value whose history they hold."""

    length: Array
    store: dict[str, Array]


class Slot(NamedTuple):
    """One buffer that a leaf keeps: its declaration."""

    name: str
    """What the leaf calls it."""
    holds: str
    """The value whose history it is, a template over the leaf's inputs and `out`: `"rms({k})"`."""
    pattern: str
    """Its shape; the axis `c` is the capacity."""
    wide: bool = False
    """Whether it is kept in float32 when the inputs are in half precision."""


class Append(NamedTuple):
    """An update of a buffer (b, c, …): new tokens (b, t, …) behind those it holds."""

    tokens: Array


class Rewrite(NamedTuple):
    """An update of a buffer (b, c, …) whose past changes too: all of it anew, and new tokens."""

    past: Array
    tokens: Array


class Replace(NamedTuple):
    """An update of a buffer that is no history of tokens: its new value."""

    value: Array


Update = Append | Rewrite | Replace
Updates = dict[str, Update]


def new_buffer(slot: Slot, shape: Shape, like: Array) -> Array:
    """A buffer of zeros for `slot`, of the library, dtype and device of `like`.

    In libraries with strides the tokens of a head (b, c, h, …) stand behind one another in memory:
    a step reads one head after the other, all of its tokens.
    """
    xp = namespace(like)
    dtype = xp.float32 if slot.wide and dtype_name(like) in HALF else like.dtype
    if len(shape) < 3 or slot.pattern.split()[1] != "c":
        return xp.zeros(shape, dtype=dtype, **placement(like))
    order = (0, 2, 1, *range(3, len(shape)))
    heads_first = xp.zeros(tuple(shape[i] for i in order), dtype=dtype, **placement(like))
    return xp.permute_dims(heads_first, order)


def updated(buffer: Array, update: Update, length: Array, count: Array, *, donate: bool) -> Array:
    """The buffer after an update by `count` (b,) tokens behind its first `length` (b,)."""
    if isinstance(update, Append):
        return append(buffer, update.tokens, length, count, donate=donate)
    in_place = donate and writes_in_place(buffer)
    new = cast(update.past if isinstance(update, Rewrite) else update.value, buffer.dtype)
    if in_place:
        buffer[...] = new
        new = buffer
    if isinstance(update, Rewrite):
        return append(new, update.tokens, length, count, donate=in_place)
    return new


def append(buffer: Array, tokens: Array, length: Array, count: Array, *, donate: bool) -> Array:
    """`buffer` (b, c, …) with `count` (b,) of `tokens` (b, t, …) behind its first `length` (b,).

    A token beyond the capacity is dropped. With `donate` the buffer itself is written to, where
    the library can.
    """
    tokens = cast(tokens, buffer.dtype)
    if writes_in_place(buffer) and (donate or not wants_gradient(buffer, tokens)):
        own = buffer if donate else copied(buffer)
        return _append_in_place(own, tokens, length, count)
    xp = namespace(buffer, tokens)
    b, capacity = buffer.shape[:2]
    t = tokens.shape[1]
    source = arange_like(capacity, length)[None, :] - length[:, None]
    is_new = (source >= 0) & (source < count[:, None])
    row = arange_like(b, length)[:, None] * t + xp.clip(source, min=0, max=t - 1)
    flat = xp.reshape(tokens, (b * t, *tokens.shape[2:]))
    moved = xp.reshape(xp.take(flat, xp.reshape(row, (-1,)), axis=0), buffer.shape)
    return xp.where(xp.reshape(is_new, (b, capacity) + (1,) * (buffer.ndim - 2)), moved, buffer)


def _append_in_place(buffer: Array, tokens: Array, length: Array, count: Array) -> Array:
    xp = namespace(buffer, tokens)
    b, t = tokens.shape[:2]
    start = _common_length(length, count, t)
    if start is not None:
        fitting = min(t, buffer.shape[1] - start)
        buffer[:, start : start + fitting, ...] = tokens[:, :fitting, ...]
        return buffer
    new = arange_like(t, length)[None, :]
    slot = length[:, None] + new
    kept = (new < count[:, None]) & (slot < buffer.shape[1])
    sequence = xp.broadcast_to(arange_like(b, length)[:, None], (b, t))
    buffer[sequence[kept], slot[kept]] = tokens[kept]
    return buffer


def _common_length(length: Array, count: Array, t: int) -> int | None:
    """The length of all sequences, where all get t tokens and it costs nothing to look."""
    if library_of(length) not in ("numpy", "torch") or device_of(length) != "cpu":
        return None
    lengths, counts = length.tolist(), count.tolist()
    is_common = lengths.count(lengths[0]) == len(lengths) and counts.count(t) == len(counts)
    return int(lengths[0]) if is_common else None
