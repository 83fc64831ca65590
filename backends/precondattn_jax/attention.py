"""Softmax attention as an algorithm of the backend: full calls in tiles, and steps.

A step is online softmax too: over the tiles of new queries with cached keys, and then with the new
keys. Cached keys and values are read once.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from precondattn.arrays import Arrays, Residuals, Tree
from precondattn.cache import Append, Updates
from precondattn.frame import Frame
from precondattn.spec.distance import added
from precondattn.spec.metric import DOT
from precondattn.spec.softmax import SoftmaxAttention, capped
from precondattn_jax.arithmetic import product_with_transposed
from precondattn_jax.definition import SteppingAsDefined
from precondattn_jax.grouped_attention import GroupedAttention, has_groups
from precondattn_jax.loops import PLAIN
from precondattn_jax.past import BufferedPast, step_bias
from precondattn_jax.tiled_attention import TiledAttention, read_of
from precondattn_jax.transported_step import TransportedStep
from precondattn_portable import attention
from precondattn_portable.extension import new_tokens
from precondattn_portable.layout import grouped_bias


class AttentionBlocks(SteppingAsDefined[SoftmaxAttention], attention.AttentionBlocks):
    """Algorithm of `Softmax` and `Path`."""

    name = "tiled attention"

    def call(self, x: Arrays, frame: Frame) -> TiledAttention:
        in_groups = self.loops is PLAIN and has_groups(self.leaf, frame)
        return (GroupedAttention if in_groups else TiledAttention)(self.leaf, x, frame, self.loops)

    def forward(self, x: Arrays, frame: Frame) -> tuple[Array, Residuals]:
        out, log_total = self.call(x, frame).forward()
        return out, (log_total,)

    def backward(
        self, x: Arrays, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        return self.call(x, frame).backward(out, residuals[0], cotangent)

    def step(self, past: Arrays, x: Arrays, frame: Frame) -> tuple[Array, Updates]:
        if self.leaf.metric != DOT:
            step = self.with_derivative_of_the_definition(self._transported_step)
            return self.few_tokens_at_a_time(step, past, x, frame)
        if self.leaf.forget != "none":
            return super().step(past, x, frame)
        return self.with_derivative_of_the_definition(self._step)(past, x, frame)

    def _transported_step(self, *arrays: Tree) -> tuple[Array, Updates]:
        step = TransportedStep(self.leaf, *arrays)
        return step.output(), step.updates()

    def _step(self, past: Arrays, x: Arrays, frame: Frame) -> tuple[Array, Updates]:
        """A step of `Softmax` without a forget gate."""
        leaf, capacity = self.leaf, past["key"].shape[1]
        updates: Updates = {"key": Append(x["k"]), "value": Append(x["v"])}
        bias: Array | None = None
        if leaf.bias:
            whole = step_bias(x["bias"], frame)
            bias, x = whole[..., :capacity], {**x, "bias": whole[..., capacity:]}
        new = TiledAttention(leaf, x, new_tokens(frame, x["q"].shape[1]))
        blocks, read = new.blocks, read_of(leaf, x)
        cached = BufferedPast(frame, capacity, new.b * new.n * new.r, leaf.window)
        position = blocks.of_queries(frame.q_position, axis=1)
        if bias is not None:
            bias = blocks.of_queries(grouped_bias(bias, new.n))
        allowed = None
        if frame.pairs is not None:
            allowed = blocks.of_queries(grouped_bias(frame.pairs[..., :capacity], new.n))

        def of_past(a: Array, state: Tree) -> Tree:
            queries = new.scores.start(a)

            def add(j: Array, state: Tree) -> Tree:
                tile = product_with_transposed(queries, cached.take(past["key"], j))
                if leaf.softcap is not None:
                    tile = capped(tile, leaf.softcap)
                pairs = jnp.reshape(tile, (new.b, new.n, new.r, blocks.size, cached.size))
                columns = cached.start(j) + jnp.arange(cached.size, dtype="int32")
                if bias is not None:
                    pairs = pairs + jnp.take(blocks.take(bias, a, 3), columns, axis=4)
                rows = blocks.take(position, a, 1)
                if leaf.distance != "none":
                    ahead = columns[None, None] - rows[:, :, None]
                    more = jnp.swapaxes(added(leaf, x, ahead), 0, 1)
                    pairs = pairs + jnp.reshape(more, (-1, *pairs.shape[1:]))
                visible = cached.visible(j, rows)
                if allowed is not None:
                    visible &= jnp.take(blocks.take(allowed, a, 3), columns, axis=4)
                tile = jnp.reshape(jnp.where(visible, pairs, -jnp.inf), tile.shape)
                return read.add(state, tile, cached.take(past["value"], j))

            return cached.over(add, state)

        o, _ = new.outputs(read, new.v, of_past)
        return blocks.unstacked(o, new.r), updates
