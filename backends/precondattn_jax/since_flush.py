"""PaTH's tokens since the last flush: cached ones, then new ones.

The cache holds keys from before the last flush in transported form; later keys are stored
untransported, with their reflections. Sequences that differ in length also differ in their last
flush. So each has a buffer of `flush` pending tokens (`pending_capacity`), whose empty entries hold
zeros; a reflection of zeros is the identity. With `flush` 1 no token is ever pending, and there is
no such buffer.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from precondattn.arrays import upcast, zero_where_not
from precondattn.frame import Frame


class SinceFlush:
    """Pending tokens of caches of some capacity, followed by t new tokens."""

    def __init__(self, flush: int, capacity: int, frame: Frame) -> None:
        self.flush, self.capacity, self.frame = flush, capacity, frame
        self.pending_capacity = 0 if flush == 1 else flush
        self.start = frame.q_position[:, :1]
        self.flushed = self.start - self.start % flush
        """The length at the last flush (b, 1): the position of the first pending token."""
        position = self.flushed + jnp.arange(self.pending_capacity, dtype=self.start.dtype)[None]
        self.is_held = position < jnp.minimum(self.start, capacity)
        self.position = jnp.concatenate([position, frame.q_position], axis=1)
        self.slot = jnp.minimum(position, capacity - 1)
        t, valid = frame.q_position.shape[1], frame.q_valid
        if valid is not None:
            t = jnp.sum(valid, axis=1, keepdims=True, dtype=self.start.dtype)
        self.length = self.start + t
        """The length including new tokens (b, 1)."""
        self.next_flushed = self.length - self.length % flush
        """The length at the last flush after this step (b, 1)."""

    def of_cache(self, buffer: Array, new: Array) -> Array:
        """The pending tokens of a buffer (b, c, …), followed by new tokens (b, t, …)."""
        result = jnp.take_along_axis(buffer, _with_axes_of(self.slot, buffer), axis=1)
        result = jnp.where(_with_axes_of(self.is_held, result), result, jnp.zeros_like(result))
        return jnp.concatenate([upcast(result), new], axis=1)

    def columns(self, x: Array) -> Array:
        """The columns of pending and new tokens, of (b, …, c + t)."""
        t = self.frame.q_position.shape[1]
        new = jnp.broadcast_to(
            self.capacity + jnp.arange(t, dtype="int32"), (self.slot.shape[0], t)
        )
        column = jnp.concatenate([self.slot, new], axis=1)
        column = jnp.reshape(column, (column.shape[0], *(1,) * (x.ndim - 2), -1))
        return jnp.take_along_axis(x, column, axis=-1)

    def visible(self, window: int | None) -> Array:
        """The tokens that each new token attends to: (b, 1, t, pending_capacity + t)."""
        assert self.frame.k_valid is not None  # It marks the empty slots of a cache.
        past, new = self.frame.k_valid[:, : self.capacity], self.frame.k_valid[:, self.capacity :]
        valid = self.of_cache(past, new)
        new_frame = Frame(self.frame.q_position, self.position, None, valid)
        return new_frame.visible(causal=True, window=window)

    def left(self, x: Array) -> Array:
        """The tokens after the next flush (b, flush, …), from all (b, pending_capacity + t, …)."""
        position = self.next_flushed + jnp.arange(self.flush, dtype=self.start.dtype)[None]
        first_new = self.pending_capacity + position - self.start
        column = jnp.where(position < self.start, position - self.flushed, first_new)
        column = jnp.clip(column, 0, x.shape[1] - 1)
        result = jnp.take_along_axis(x, _with_axes_of(column, x), axis=1)
        return zero_where_not(_with_axes_of(position < self.length, x), result)


def _with_axes_of(x: Array, other: Array) -> Array:
    """(b, s) reshaped to as many axes as `other` has."""
    return jnp.reshape(x, (*x.shape, *(1,) * (other.ndim - 2)))
