"""A step of PaTH: cached keys are read once, and rewritten only at a flush.

The cache holds keys K transported to the last multiple of `flush`. With the keys k and directions w
of later tokens, including the new ones,

    B = tril(q wᵀ),    R = stril(w kᵀ),    Z = (I + diag(β) stril(w wᵀ))⁻¹ diag(β),

    (q − B (Z w)) Kᵀ           scores with keys from before the last flush,
    q kᵀ − B (Z R)             scores with keys since.

At a flush, with w' the directions up to it and zeros for the others,

    K ← K − (K (Z w)ᵀ) w',    k ← k − (Z R)ᵀ w'.

All of it is computed by products, also the inverse in Z.
"""

from __future__ import annotations

from typing import cast

import jax.numpy as jnp
from jax import Array, lax

import precondattn as pa
from precondattn.arrays import Arrays, Tree, upcast, zero_where_not
from precondattn.cache import Append, Replace, Rewrite, Updates, append
from precondattn.frame import Frame
from precondattn.spec import forget_gate
from precondattn.spec.softmax import SoftmaxAttention
from precondattn_jax.arithmetic import product, product_with_transposed, transposed_product
from precondattn_jax.layout import grouped, heads_first
from precondattn_jax.past import BufferedPast, step_bias
from precondattn_jax.tiled_attention import read_of
from precondattn_jax.transported_scores import reflections
from precondattn_portable.layout import grouped_bias


class SinceFlush:
    """Pending tokens of caches of some capacity, followed by t new tokens.

    Sequences that differ in length also differ in their last flush. So each has a buffer of `flush`
    pending tokens (`pending_capacity`), whose empty entries hold zeros; a reflection of zeros is
    the identity. With `flush` 1 no token is ever pending, and there is no such buffer.
    """

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


class TransportedStep:
    """The step of `Path` for a few new tokens."""

    def __init__(self, leaf: SoftmaxAttention, past: Arrays, x: Arrays, frame: Frame) -> None:
        self.leaf, self.past, self.x, self.frame = leaf, past, x, frame
        self.since = since = SinceFlush(cast("pa.Path", leaf).flush, past["key"].shape[1], frame)
        self.k = since.of_cache(past["key"], x["k"])
        self.w, self.beta = x["w"], x["beta"]
        if since.pending_capacity:
            self.w = jnp.concatenate([past["pending_w"], self.w], axis=1)
            self.beta = jnp.concatenate([past["pending_beta"], self.beta], axis=1)
        k, w, beta = (heads_first(a) for a in (self.k, self.w, self.beta))
        self.recent = reflections(k, w, beta[..., None])
        self.decay = self.decay_update = None
        if leaf.forget != "none":
            self.decay, self.decay_update = forget_gate.extended_decay(past["decay"], x["g"])

    # ------------------------------------------------------------------------------- output

    def output(self) -> Array:
        leaf, since, position = self.leaf, self.since, self.frame.q_position
        (n, d), (b, t, h, _) = self.x["k"].shape[2:], self.x["q"].shape
        q = grouped(self.x["q"], n) * leaf.scale_for(d)
        rows = jnp.reshape(q, (b, n, -1, d))
        k, w = heads_first(self.k), heads_first(self.w)
        v = heads_first(since.of_cache(self.past["value"], self.x["v"]))
        # Its shape is (b, n or 1, r or 1, t, c + t), a few times the cache, as new tokens are few.
        score_bias: Array | None = None
        if self.decay is not None:
            score_bias = grouped_bias(leaf._gate_scale(d) * self.decay, n)
        if leaf.bias:
            bias = grouped_bias(step_bias(self.x["bias"], self.frame), n)
            score_bias = bias if score_bias is None else score_bias + bias
        read = read_of(leaf, self.x)

        def pairs(tile: Array) -> Array:
            return jnp.reshape(tile, (b, n, h // n, t, tile.shape[3]))

        def add(state: Tree, tile: Array, more: Array | None, visible: Array, v: Array) -> Tree:
            scores = pairs(tile) if more is None else pairs(tile) + more
            return read.add(state, jnp.reshape(jnp.where(visible, scores, -jnp.inf), tile.shape), v)

        q_w = product_with_transposed(rows, w)
        q_w = jnp.reshape(jnp.tril(pairs(q_w), k=since.pending_capacity), q_w.shape)
        scores_since_flush = product_with_transposed(rows, k) - product(q_w, self.recent.zr)
        more = None if score_bias is None else since.columns(score_bias)
        state = read.start((*rows.shape[:3], v.shape[3]), v)
        state = add(state, scores_since_flush, more, since.visible(leaf.window)[:, :, None], v)

        far = rows - product(q_w, self.recent.zw)
        cached = BufferedPast(self.frame, since.capacity, b * h, leaf.window, since.flushed)

        def of_block(j: Array, state: Tree) -> Tree:
            tile = product_with_transposed(far, cached.take(self.past["key"], j))
            more = score_bias
            if more is not None:
                more = lax.dynamic_slice_in_dim(more, cached.start(j), cached.size, 4)
            visible = cached.visible(j, position)
            return add(state, tile, more, visible, cached.take(self.past["value"], j))

        o, _ = read.finish(cached.over(of_block, state))
        return heads_first(jnp.reshape(o, (b, h, t, o.shape[3])))

    # ------------------------------------------------------------------------------ updates

    def updates(self) -> Updates:
        since = self.since
        updates: Updates = {"key": self._keys(), "value": Append(self.x["v"])}
        if since.pending_capacity:
            updates["pending_w"] = Replace(since.left(self.w))
            updates["pending_beta"] = Replace(since.left(self.beta))
        if self.decay_update is not None:
            updates["decay"] = self.decay_update
        return updates

    def _keys(self) -> Rewrite:
        """The cached keys for the next step, and the new keys."""
        past = self.past["key"]
        if not self.since.pending_capacity:
            return self._flushed(past)
        keys: Rewrite = lax.cond(
            jnp.any(self.since.next_flushed > self.since.flushed),
            self._flushed,
            lambda past: Rewrite(past, self.x["k"]),
            past,
        )
        return keys

    def _flushed(self, past: Array) -> Rewrite:
        since, pending_capacity = self.since, self.since.pending_capacity
        is_applied = since.position < since.next_flushed
        applied = heads_first(zero_where_not(is_applied[:, :, None, None], self.w))
        keys = heads_first(past)
        old = keys - product(product_with_transposed(keys, self.recent.zw), applied)
        old, new = heads_first(old), transposed_product(self.recent.zr, applied)
        new = self.k - heads_first(new)
        if pending_capacity:
            waiting = (since.start - since.flushed)[:, 0]
            old = append(old, new[:, :pending_capacity], since.flushed[:, 0], waiting, donate=False)
        return Rewrite(old, new[:, pending_capacity:])
