"""The updates that a step makes to buffers: append tokens, rewrite rows, or replace a state."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from precondattn.arrays import (
    Array,
    arange_like,
    as_index,
    cast,
    fresh,
    host_integers,
    namespace,
    take_tokens,
    wants_gradient,
    writes_in_place,
)
from precondattn.frameworks import of
from precondattn.frameworks.framework import Framework
from precondattn.limits import KEPT


class Append(NamedTuple):
    """An update that appends new tokens (b, t, …) to the cached ones in a buffer (b, c, …)."""

    tokens: Array


class Rewrite(NamedTuple):
    """An update that replaces the first rows of a buffer (b, c, …), and appends new tokens.

    `past` has the new first rows. It may have fewer rows than the buffer; then the other rows must
    be empty, and are not changed.
    """

    past: Array
    tokens: Array


class Replace(NamedTuple):
    """An update that replaces a state by the new state.

    If the buffer is a history of tokens, `value` may have only its first rows, if the others are
    empty.
    """

    value: Array


Update = Append | Rewrite | Replace
Updates = dict[str, Update]


def updated(
    buffer: Array,
    update: Update,
    length: Array,
    count: Array,
    *,
    donate: bool,
    held: int | None = None,
) -> Array:
    """The buffer after an update with `count` (b,) new tokens that follow `length` (b,) tokens."""
    if isinstance(update, Append):
        return append(buffer, update.tokens, length, count, donate=donate, held=held)
    new = cast(update.past if isinstance(update, Rewrite) else update.value, buffer.dtype)
    if new is buffer:  # The state was computed in place.
        return buffer
    rows = new.shape[1]
    is_part = rows < buffer.shape[1]
    in_place = writes_in_place(buffer, *update) and (
        donate or (is_part and not wants_gradient(buffer, *update))
    )
    if in_place:
        buffer = buffer if donate else fresh(buffer)
        buffer[:, :rows, ...] = new
        new = buffer
    elif is_part:
        new = namespace(buffer).concat([new, buffer[:, rows:, ...]], axis=1)
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
    """`buffer` (b, c, …) with the first `count` (b,) of `tokens` (b, t, …) after row `length` − 1.

    Tokens beyond the capacity are dropped. If `donate` is set, the buffer itself is written to,
    in libraries that can.
    """
    if 0 in (*tokens.shape[:2], buffer.shape[1]):
        return buffer if donate else fresh(buffer)
    tokens = cast(tokens, buffer.dtype)
    if writes_in_place(buffer, tokens) and (donate or not wants_gradient(buffer, tokens)):
        target = buffer if donate else fresh(buffer)
        if held is None:
            lengths, counts, t = host_integers(length), host_integers(count), tokens.shape[1]
            if lengths is not None and counts is not None and counts.count(t) == len(counts):
                held = lengths[0] if lengths.count(lengths[0]) == len(lengths) else None
        if held is not None:
            fitting = min(tokens.shape[1], target.shape[1] - held)
            fits = fitting == tokens.shape[1]
            target[:, held : held + fitting] = tokens if fits else tokens[:, :fitting]
            return target
        return _append_in_place(target, tokens, length, count)
    if held is not None:
        count = namespace(length).full_like(length, tokens.shape[1])
    return _compiled(of(buffer))(buffer, tokens, length, count)


def _appended(buffer: Array, tokens: Array, length: Array, count: Array) -> Array:
    xp = namespace(buffer, tokens)
    b, capacity = buffer.shape[:2]
    t = tokens.shape[1]
    source = arange_like(capacity, length)[None, :] - length[:, None]
    is_new = (source >= 0) & (source < count[:, None])
    gathered = take_tokens(tokens, xp.clip(source, min=0, max=t - 1))
    return xp.where(xp.reshape(is_new, (b, capacity) + (1,) * (buffer.ndim - 2)), gathered, buffer)


@lru_cache(maxsize=KEPT)
def _compiled(framework: Framework) -> Callable[[Array, Array, Array, Array], Array]:
    """`_appended` as one function; outside `jax.jit`, JAX runs each operation alone."""
    return framework.compiled(_appended)


def _append_in_place(buffer: Array, tokens: Array, length: Array, count: Array) -> Array:
    """`append` to a buffer that is written to. It reads no entry, so that no device is waited for.

    A token that is dropped has a slot of its own, to which its old row is written.
    """
    xp, capacity = namespace(buffer, tokens), buffer.shape[1]
    tokens = tokens[:, :capacity]
    b, t = tokens.shape[:2]
    new = arange_like(t, length)[None, :]
    slot = length[:, None] + new
    is_kept = (new < count[:, None]) & (slot >= 0) & (slot < capacity)
    rows = as_index(arange_like(b, length)[:, None]), as_index(slot % capacity)
    is_kept = xp.reshape(is_kept, (b, t, *(1,) * (tokens.ndim - 2)))
    buffer[rows] = xp.where(is_kept, tokens, buffer[rows])
    return buffer
