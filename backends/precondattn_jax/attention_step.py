"""A step of softmax attention: tiles of new queries with the cache, then with the new tokens.

Both use the same read, whose state is merged from tile to tile. Cached keys and values are read
once.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from precondattn.arrays import Tree
from precondattn.frame import Frame
from precondattn.spec.soft_cap import capped
from precondattn.spec.softmax import SoftmaxAttention, bias_of_keys
from precondattn_jax.arithmetic import product_with_transposed
from precondattn_jax.past import BufferedPast, with_derivative_of_the_definition
from precondattn_jax.tiled_attention import TiledAttention, read_of
from precondattn_portable.extension import new_tokens
from precondattn_portable.layout import grouped_bias


@with_derivative_of_the_definition
def attention_step(
    leaf: SoftmaxAttention, past: dict[str, Array], x: dict[str, Array], frame: Frame
) -> Array:
    """The output (b, t, h, e) of `Softmax` without a forget gate."""
    t, capacity = x["q"].shape[1], past["key"].shape[1]
    new_frame = new_tokens(frame, t)
    bias: Array | None = None
    if leaf.bias:
        whole = bias_of_keys(x["bias"], frame)
        if frame.q_valid is not None:  # A bias may be NaN at padding.
            whole = jnp.where(frame.q_valid[:, None, :, None], whole, 0.0)
        bias, x = whole[..., :capacity], {**x, "bias": whole[..., capacity:]}
    new = TiledAttention(leaf, x, new_frame)
    blocks, n = new.blocks, new.n
    read = read_of(leaf, x)
    cached = BufferedPast(frame, capacity, new.b * n * new.r)
    if leaf.window is not None:
        cached.look_no_further_than(leaf.window)
    position = blocks.of_queries(frame.q_position, axis=1)
    if bias is not None:
        bias = blocks.of_queries(grouped_bias(bias, n))

    def of_past(a: Array, rows: Array, state: Tree) -> Tree:
        def add(j: Array, state: Tree) -> Tree:
            tile = product_with_transposed(rows, cached.take(past["key"], j))
            if leaf.softcap is not None:
                tile = capped(tile, leaf.softcap)
            pairs = jnp.reshape(tile, (new.b, n, new.r, blocks.size, cached.size))
            if bias is not None:
                columns = cached.start(j) + jnp.arange(cached.size)
                pairs = pairs + jnp.take(blocks.take(bias, a, 3), columns, axis=4)
            visible = cached.visible(j, blocks.take(position, a, 1), leaf.window)
            tile = jnp.reshape(jnp.where(visible, pairs, -jnp.inf), tile.shape)
            return read.add(state, tile, cached.take(past["value"], j))

        return cached.over(add, state)

    o, _ = new.outputs(read, new.v, of_past)
    return blocks.unstacked(o, new.r)
