"""Sampling the next token from logits: the most probable one, or by temperature and top-p."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def chosen(
    logits: jax.Array, key: jax.Array | None, temperature: jax.Array, top_p: jax.Array
) -> jax.Array:
    """One token (b,) for each row of logits (b, vocabulary); the most probable without a key."""
    if key is None:
        return jnp.argmax(logits, axis=-1)
    p = jax.nn.softmax(logits.astype(jnp.float32) / temperature, axis=-1)
    order = jnp.argsort(-p, axis=-1)
    p = jnp.take_along_axis(p, order, axis=-1)
    p = jnp.where(jnp.cumsum(p, axis=-1) - p < top_p, p, 0)
    rank = jax.random.categorical(key, jnp.log(p), axis=-1)
    return jnp.take_along_axis(order, rank[:, None], axis=-1)[:, 0]
