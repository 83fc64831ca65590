"""The tokens in a cache, one block of slots at a time, up to the last filled block.

The number of blocks is known only at run time. JAX has no reverse mode of such a loop, so the
derivative is that of the leaf's definition, which stores all pairs of new and cached tokens at
once.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from precondattn.arrays import Tree, upcast
from precondattn.frame import Frame
from precondattn.spec.softmax import bias_of_keys
from precondattn_jax.layout import block_size, heads_first


class BufferedPast:
    """Buffers (b, c, n, …), before new tokens with `heads` heads (of all sequences) and a window.

    Slots from `end` (b, 1) on are skipped.
    """

    def __init__(
        self, frame: Frame, capacity: int, heads: int, window: int | None, end: Array | None = None
    ) -> None:
        assert frame.k_valid is not None  # It marks the empty slots of a cache.
        self.capacity, self.window, self.valid = capacity, window, frame.k_valid[:, :capacity]
        if end is not None:
            self.valid = self.valid & (jnp.arange(capacity, dtype="int32")[None, :] < end)
        self.size = min(block_size(capacity, heads), capacity)
        length, self.prefix = frame.q_position[:, 0], None
        if window is not None and frame.q_prefix is not None:
            self.prefix = frame.q_prefix[:, :1]  # All tokens of a sequence have one prefix.
        filled = jnp.clip(jnp.max(length), 0, capacity)
        self.first, self.stop = jnp.zeros_like(filled), (filled + self.size - 1) // self.size
        if window is not None and self.prefix is None:
            # The blocks before the first token's window are skipped.
            low = jnp.clip(jnp.min(length) - window + 1, 0, capacity)
            self.first = jnp.minimum(low // self.size, self.stop)

    def start(self, j: Array) -> Array:
        """The first slot of block j; the last block begins earlier if it would not fit."""
        return jnp.minimum(j * self.size, self.capacity - self.size)

    def take(self, buffer: Array, j: Array) -> Array:
        """The slots of block j (b, n, C, …), in float32 or float64."""
        result = lax.dynamic_slice_in_dim(buffer, self.start(j), self.size, 1)
        return upcast(heads_first(result))

    def visible(self, j: Array, position: Array) -> Array:
        """Which slots of block j rows at `position` (b, rows) see: (b, 1, 1, 1 or rows, C)."""
        slot = self.start(j) + jnp.arange(self.size, dtype="int32")[None, :]
        visible = lax.dynamic_slice_in_dim(self.valid, self.start(j), self.size, 1)
        visible = (visible & (slot >= j * self.size))[:, None, :]
        if self.window is not None:
            near = position[:, :, None] - slot[:, None, :] < self.window
            if self.prefix is not None:
                near = near | (slot < self.prefix)[:, None, :]
            visible = visible & near
        return visible[:, None, None]

    def over(self, add: Callable[[Array, Tree], Tree], state: Tree) -> Tree:
        """Apply add(j, state) to all filled blocks."""
        return lax.fori_loop(self.first, self.stop, add, state)


def step_bias(bias: Array, frame: Frame) -> Array:
    """The bias of the frame's keys (b, h or 1, t, c + t), 0 at padding, where it may be NaN."""
    bias = bias_of_keys(bias, frame)
    return bias if frame.q_valid is None else jnp.where(frame.q_valid[:, None, :, None], bias, 0.0)
