"""Arrays as kernels read them: masked, or with heads first. XLA computes these, and LUCID's norm.

k̂ = k / rms(k),    dk = (dk̂ − k̂ mean(k̂ dk̂)) / rms(k),    rms(k)² = mean(k²) + ε
"""

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


def by_heads(array: Array, tokens: int, width: int) -> Array:
    """(b, s, n, w) as (b n, tokens, width), padded with 0."""
    b, s, n, w = array.shape
    array = jnp.swapaxes(array, 1, 2).reshape(b * n, s, w)
    return jnp.pad(array, ((0, 0), (0, tokens - s), (0, width - w)))


def by_tokens(array: Array, like: Array) -> Array:
    """(b n, T, width) as (b, s, n, w), the shape of `like` and its dtype."""
    b, s, n, w = like.shape
    array = array[:, :s, :w].reshape(b, n, s, w)
    return jnp.swapaxes(array, 1, 2).astype(like.dtype)


def factor_of(beta: Array, valid: Array, k: Array) -> Array:
    """β or 1, and 0 at padding (b, s, n)."""
    factor = jnp.ones(k.shape[:3], jnp.float32) if beta is None else beta.astype(jnp.float32)
    return where_valid(valid, factor)


def reciprocal_rms(keys: Array, eps: float | None) -> Array:
    """1 / rms (b, s, n) of keys in float32; 1 where `eps` is None: keys are not normalised."""
    if eps is None:
        return jnp.ones(keys.shape[:3], jnp.float32)
    mean_square = jnp.mean(keys * keys, axis=3) + eps
    return 1 / jnp.sqrt(jnp.where(mean_square > 0, mean_square, 1.0))


def rms_gradient(
    d_unit: Array, k: Array, reciprocal: Array, valid: Array, eps: float | None
) -> Array:
    """dk from dk̂ (b, s, n, d), in the dtype of k; `reciprocal` is from `reciprocal_rms`."""
    if eps is not None:
        unit = where_valid(valid, k).astype(jnp.float32) * reciprocal[..., None]
        along = jnp.mean(unit * d_unit, axis=3, keepdims=True)
        d_unit = (d_unit - unit * along) * reciprocal[..., None]
    return where_valid(valid, d_unit).astype(k.dtype)


def d_beta_of(before: Array, rho: Array, beta: Array, valid: Array) -> Array:
    """Σ X ρ, with X by heads and ρ (b, s, n, e)."""
    before = by_tokens(before, rho.astype(jnp.float32))
    d_beta = jnp.sum(before * where_valid(valid, rho).astype(jnp.float32), axis=3)
    return where_valid(valid, d_beta).astype(beta.dtype)
