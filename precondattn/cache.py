"""Caches: the arrays that are needed to continue a sequence.

A cache is `Cache(length, store)`: the number of tokens of each sequence of the batch, and buffers.
The key of a buffer is the value whose history it stores, so that a value that several pieces read
is stored once. Both are plain tuples and dicts of arrays: pytrees in JAX and PyTorch, and
picklable. The layout belongs to the mechanism, not to a backend: one backend may prefill a cache
and another decode from it.
"""

from __future__ import annotations

from typing import NamedTuple

from precondattn.arrays import (
    HALF,
    Array,
    Shape,
    arange_like,
    cast,
    copied,
    dtype_name,
    host_integers,
    namespace,
    placement,
    take_tokens,
    wants_gradient,
    writes_in_place,
)

KEY_MASK = "key_mask"
"""The buffer (b, c) with the mask of cached keys; only in a cache created with `key_mask=True`."""


class Cache(NamedTuple):
    """The number of tokens per sequence (b,), and buffers by the value whose history they store."""

    length: Array
    store: dict[str, Array]


class Slot(NamedTuple):
    """The declaration of one cache buffer of a leaf."""

    name: str
    """The leaf's name of the buffer."""
    holds: str
    """The value whose history it stores, a template over the leaf's inputs and `out`, such as
    `"rms({k})"`."""
    pattern: str
    """Its shape; the axis `c` is the capacity."""
    wide: bool = False
    """Whether it is stored in float32 when the inputs are in half precision."""
    is_rewritten: bool = False
    """Whether a step also changes the rows of cached tokens."""


class Append(NamedTuple):
    """An update of a buffer (b, c, …): new tokens (b, t, …) to append to the cached ones."""

    tokens: Array


class Rewrite(NamedTuple):
    """An update of a buffer (b, c, …) that replaces the cached rows and appends new tokens."""

    past: Array
    tokens: Array


class Replace(NamedTuple):
    """An update of a buffer that is a state, not a history of tokens: the new state."""

    value: Array


Update = Append | Rewrite | Replace
Updates = dict[str, Update]


def new_buffer(slot: Slot, shape: Shape, like: Array) -> Array:
    """A buffer of zeros for `slot`, of the library, dtype and device of `like`.

    In libraries with strides the memory layout is (b, h, …, c), so that the tokens of one feature
    are contiguous: a step multiplies few rows by many tokens, and reads this layout twice as fast.
    Rewritten buffers have the layout (b, h, c, …).
    """
    xp = namespace(like)
    dtype = xp.float32 if slot.wide and dtype_name(like) in HALF else like.dtype
    if len(shape) < 3 or slot.pattern.split()[1] != "c":
        return xp.zeros(shape, dtype=dtype, **placement(like))
    token_axis = 2 if slot.is_rewritten else len(shape) - 1
    others = [size for axis, size in enumerate(shape) if axis != 1]
    memory_shape = (*others[:token_axis], shape[1], *others[token_axis:])
    zeros = xp.zeros(memory_shape, dtype=dtype, **placement(like))
    return xp.moveaxis(zeros, token_axis, 1)


def updated(
    buffer: Array,
    update: Update,
    length: Array,
    count: Array,
    *,
    donate: bool,
    held: int | None = None,
) -> Array:
    """The buffer after an update by `count` (b,) tokens that follow its first `length` (b,).

    If `held` is given, it is the length of all sequences, and all tokens are appended to each.
    """
    if isinstance(update, Append):
        return append(buffer, update.tokens, length, count, donate=donate, held=held)
    in_place = donate and writes_in_place(buffer)
    new = cast(update.past if isinstance(update, Rewrite) else update.value, buffer.dtype)
    if in_place:
        buffer[...] = new
        new = buffer
    if isinstance(update, Rewrite):
        return append(new, update.tokens, length, count, donate=in_place, held=held)
    return new


def append(
    buffer: Array,
    tokens: Array,
    length: Array,
    count: Array,
    *,
    donate: bool,
    held: int | None = None,
) -> Array:
    """`buffer` (b, c, …) with `count` (b,) of `tokens` (b, t, …) after its first `length` (b,).

    Tokens beyond the capacity are dropped. With `donate` the buffer itself is written to, where
    the library can.
    """
    tokens = cast(tokens, buffer.dtype)
    if writes_in_place(buffer) and (donate or not wants_gradient(buffer, tokens)):
        target = buffer if donate else copied(buffer)
        if held is None:
            held = _common_length(length, count, tokens.shape[1])
        if held is not None:
            fitting = min(tokens.shape[1], target.shape[1] - held)
            target[:, held : held + fitting] = tokens[:, :fitting]
            return target
        return _append_in_place(target, tokens, length, count)
    xp = namespace(buffer, tokens)
    b, capacity = buffer.shape[:2]
    t = tokens.shape[1]
    if held is not None:
        count = xp.full_like(length, t)
    source = arange_like(capacity, length)[None, :] - length[:, None]
    is_new = (source >= 0) & (source < count[:, None])
    gathered = take_tokens(tokens, xp.clip(source, min=0, max=t - 1))
    return xp.where(xp.reshape(is_new, (b, capacity) + (1,) * (buffer.ndim - 2)), gathered, buffer)


def _append_in_place(buffer: Array, tokens: Array, length: Array, count: Array) -> Array:
    xp = namespace(buffer, tokens)
    b, t = tokens.shape[:2]
    new = arange_like(t, length)[None, :]
    slot = length[:, None] + new
    kept = (new < count[:, None]) & (slot < buffer.shape[1])
    sequence = xp.broadcast_to(arange_like(b, length)[:, None], (b, t))
    buffer[sequence[kept], slot[kept]] = tokens[kept]
    return buffer


def _common_length(length: Array, count: Array, t: int) -> int | None:
    """The length of all sequences, if it is known on the host and all sequences get t tokens."""
    lengths, counts = host_integers(length), host_integers(count)
    if lengths is None or counts is None:
        return None
    is_common = lengths.count(lengths[0]) == len(lengths) and counts.count(t) == len(counts)
    return lengths[0] if is_common else None
