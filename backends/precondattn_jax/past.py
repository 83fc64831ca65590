"""The tokens in a cache, one block of slots at a time, up to the last filled block.

The number of blocks is known only at run time. JAX has no reverse mode of such a loop, so the
derivative is that of the leaf's definition, which stores all pairs of new and cached tokens at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.arrays import Tree, upcast, upcast_all
from precondattn.execution.jax.derivative import with_derivative
from precondattn.frame import Frame
from precondattn_jax.layout import block_size, heads_first


class BufferedPast:
    """Buffers (b, c, n, …), followed by new tokens with `heads` heads (of all sequences)."""

    def __init__(self, frame: Frame, capacity: int, heads: int) -> None:
        assert frame.k_valid is not None  # A cache has slots that are not filled.
        self.valid = frame.k_valid[:, :capacity]
        self.position = frame.q_position
        self.capacity = capacity
        self.size = min(block_size(capacity, heads), capacity)
        filled = jnp.clip(jnp.max(frame.q_position[:, 0]), 0, capacity)
        self.first = jnp.zeros_like(filled)
        self.stop = (filled + self.size - 1) // self.size

    def look_no_further_than(self, window: int) -> None:
        """Skip the blocks before the first token's window."""
        low = jnp.clip(jnp.min(self.position[:, 0]) - window + 1, 0, self.capacity)
        self.first = jnp.minimum(low // self.size, self.stop)

    def look_before(self, end: Array) -> None:
        """Skip the slots from `end` (b, 1) on."""
        self.valid = self.valid & (jnp.arange(self.capacity) < end)

    def start(self, j: Array) -> Array:
        """The first slot of block j; the last block begins earlier if it would not fit."""
        return jnp.minimum(j * self.size, self.capacity - self.size)

    def take(self, buffer: Array, j: Array) -> Array:
        """The slots of block j (b, n, C, …), in float32 or float64."""
        result = lax.dynamic_slice_in_dim(buffer, self.start(j), self.size, 1)
        return upcast(heads_first(result))

    def visible(self, j: Array, position: Array | None = None, window: int | None = None) -> Array:
        """(b, 1, 1, 1 or rows, C); a window needs the positions (b, rows)."""
        slot = self.start(j) + jnp.arange(self.size)
        visible = lax.dynamic_slice_in_dim(self.valid, self.start(j), self.size, 1)
        visible = (visible & (slot >= j * self.size))[:, None, :]
        if window is not None:
            assert position is not None
            visible = visible & (position[:, :, None] - slot < window)
        return visible[:, None, None]

    def over(self, add: Callable[[Array, Tree], Tree], state: Tree) -> Tree:
        """Apply add(j, state) to all filled blocks."""
        return lax.fori_loop(self.first, self.stop, add, state)


Step = TypeVar("Step", bound=Callable[..., Tree])


def with_derivative_of_the_definition(step: Step) -> Step:
    """`step(leaf, past, x, frame)` with the derivative of the leaf's own step, in any mode.

    `step` returns the output for new tokens, or the output and the leaf's updates.
    """

    def derivative(leaf: LeafProtocol, primals: Tree, tangents: Tree) -> tuple[Tree, Tree]:
        past, x, frame = primals
        result = differentiable(leaf, past, x, frame)

        @jax.checkpoint
        def defined(past: Mapping[str, Array], x: Mapping[str, Array]) -> Tree:
            result_and_updates = leaf.step(upcast_all(past), x, frame)
            return result_and_updates if isinstance(result, tuple) else result_and_updates[0]

        return result, jax.jvp(defined, (past, x), tangents[:2])[1]

    def differentiable(leaf: LeafProtocol, *arrays: Tree) -> Tree:
        return with_derivative(partial(step, leaf), partial(derivative, leaf))(*arrays)

    return cast(Step, differentiable)
