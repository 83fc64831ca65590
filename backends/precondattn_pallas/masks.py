"""Masks of a frame in the form that kernels read."""

from __future__ import annotations

import jax.numpy as jnp

from precondattn.arrays import Array


def where_valid(valid: Array, array: Array) -> Array:
    """The array, 0 at padding (second axis), even if it holds NaN there; valid (b, s)."""
    if valid is None:
        return array
    shape = (*valid.shape, *[1] * (array.ndim - 2))
    return jnp.where(valid.reshape(shape), array, jnp.zeros((), array.dtype))


def runs_of(segment: Array) -> Array:
    """The index of each token's run of equal ids (b, s); the ids themselves may have 64 bits."""
    is_new = (segment[:, 1:] != segment[:, :-1]).astype(jnp.int32)
    return jnp.cumsum(jnp.pad(is_new, ((0, 0), (1, 0))), axis=1, dtype=jnp.int32)
