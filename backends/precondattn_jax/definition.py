"""A step of few new tokens at a time, which bounds its memory to a few times the cache.

By the definition of a cache, any split of a sequence gives the same output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jax import Array, lax

from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.arrays import Tree, cast, upcast_all
from precondattn.cache import Replace, Updates, append, updated
from precondattn.frame import Frame
from precondattn_jax.layout import is_known

TOKENS = 64
"""New tokens per step."""

Step = Callable[[dict[str, Array], dict[str, Array], Frame], tuple[Array, Updates]]


def step_as_defined(
    leaf: LeafProtocol, past: Mapping[str, Array], x: Mapping[str, Array], frame: Frame
) -> tuple[Array, Updates]:
    """The leaf's own step: the output for new tokens, and the update of every slot."""
    return few_tokens_at_a_time(leaf.step, leaf, upcast_all(past), x, frame)


def few_tokens_at_a_time(
    step: Step, leaf: LeafProtocol, past: Mapping[str, Array], x: Mapping[str, Array], frame: Frame
) -> tuple[Array, Updates]:
    """A step of the leaf as several steps of few tokens."""
    t = frame.q_position.shape[1]
    if is_known(t) and t <= TOKENS:
        return step(dict(past), dict(x), frame)
    past = upcast_all(past)
    count = -(-t // TOKENS)
    capacity = frame.k_position.shape[1] - t
    assert frame.k_valid is not None  # A cache has slots that are not filled.
    slot_valid, new_valid = frame.k_valid[:, :capacity], frame.k_valid[:, capacity:]
    slots, length = frame.k_position[:, :capacity], frame.q_position[:, 0]
    q_valid = jnp.ones_like(new_valid) if frame.q_valid is None else frame.q_valid
    parts = {name: _parts(a, leaf.inputs[name].time_axis, count) for name, a in x.items()}
    whole = {name: a for name, a in x.items() if leaf.inputs[name].time_axis is None}

    def some_tokens(carry: Tree, xs: Tree) -> tuple[Tree, Array]:
        buffers, length, slot_valid = carry
        tokens, new_valid, q_valid = xs
        position = length[:, None] + jnp.arange(TOKENS, dtype=length.dtype)[None, :]
        part_frame = Frame(
            position,
            jnp.concatenate([slots, position], axis=1),
            q_valid,
            jnp.concatenate([slot_valid, new_valid], axis=1),
        )
        out, updates = step(buffers, tokens | whole, part_frame)
        count_valid = jnp.sum(cast(q_valid, length.dtype), axis=1, dtype=length.dtype)
        buffers = {
            slot: updated(buffers[slot], update, length, count_valid, donate=False)
            for slot, update in updates.items()
        }
        slot_valid = append(slot_valid, new_valid, length, count_valid, donate=False)
        return (buffers, length + count_valid, slot_valid), out

    tokens = {name: a for name, a in parts.items() if a is not None}
    xs = (tokens, _parts(new_valid, 1, count), _parts(q_valid, 1, count))
    (buffers, _, _), outs = lax.scan(some_tokens, (dict(past), length, slot_valid), xs)
    out = jnp.moveaxis(outs, 0, 1)
    out = jnp.reshape(out, (out.shape[0], count * TOKENS, *out.shape[3:]))[:, :t]
    return out, {slot: Replace(buffer) for slot, buffer in buffers.items()}


def _parts(x: Array, axis: int | None, count: int) -> Array | None:
    """Tokens in parts (count, …), the last one padded with zeros."""
    if axis is None:
        return None
    width = [(0, 0)] * x.ndim
    width[axis] = (0, count * TOKENS - x.shape[axis])
    shape = (*x.shape[:axis], count, TOKENS, *x.shape[axis + 1 :])
    return jnp.moveaxis(jnp.reshape(jnp.pad(x, width), shape), axis, 0)
