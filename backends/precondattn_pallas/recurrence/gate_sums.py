"""The decay factors of a chunk, and the gates' gradient, from a few numbers for each token.

    reading_i = e^{g_1 + … + g_i},    writing_j = e^{g_{j+1} + … + g_C},    total = reading_C

XLA computes these. The gradient of a gate is a sum over everything that it separates: pairs of
tokens (`crossing`, from the kernels), a token and the state before the chunk, a token and the state
after it, and the two states. Arrays are (m, T, …), in whole chunks.
"""

from __future__ import annotations

import jax.numpy as jnp

from precondattn.arrays import Array, Arrays


def factors_of(g: Array, chunk: int) -> Arrays:
    """reading and writing (m, T) or (m, T, d), and total (m, chunks, 1 or d)."""
    chunks = g.reshape(g.shape[0], -1, chunk, *g.shape[2:])
    reading = jnp.exp(jnp.cumsum(chunks, axis=2))
    total = reading[:, :, -1, ...]
    return {
        "reading": reading.reshape(g.shape),
        "writing": jnp.exp(_after(chunks)).reshape(g.shape),
        "total": total if g.ndim == 3 else total[..., None],
    }


def before_decays(g: Array, chunk: int) -> Arrays:
    """g and reading (m, T) of the token before, in the same chunk."""
    preceding = _shifted(g.reshape(g.shape[0], -1, chunk))
    erasing = jnp.exp(jnp.cumsum(preceding, axis=2))
    return {"preceding": preceding.reshape(g.shape), "erasing": erasing.reshape(g.shape)}


def by_next(x: Array, chunk: int) -> Array:
    """The numbers (m, T) of the next token, 0 for a chunk's last, for reads before the decay."""
    chunks = x.reshape(x.shape[0], -1, chunk)
    return jnp.pad(chunks[:, :, 1:], ((0, 0), (0, 0), (0, 1))).reshape(x.shape)


def d_gates(crossing: Array, reads: Array, writes: Array, kept: Array, chunk: int) -> Array:
    """The gates' gradient, from the sums of dx ∘ x of everything that the gates multiply.

    `crossing`: of pairs, already by gate. `reads` and `writes`: of reads from the state before the
    chunk and writes to the state after it, by token. `kept`: of the two states (m, chunks, …).
    """

    def chunks(array: Array) -> Array:
        return array.reshape(array.shape[0], -1, chunk, *array.shape[2:])

    result = _from(chunks(reads)) + _before(chunks(writes)) + kept[:, :, None, ...]
    return crossing + result.reshape(crossing.shape)


def _from(x: Array) -> Array:
    """Σ_{j≥i} x_j along a chunk's tokens."""
    return jnp.flip(jnp.cumsum(jnp.flip(x, axis=2), axis=2), axis=2)


def _after(x: Array) -> Array:
    """Σ_{j>i} x_j"""
    return _from(jnp.concatenate([x[:, :, 1:, ...], jnp.zeros_like(x[:, :, :1, ...])], axis=2))


def _before(x: Array) -> Array:
    """Σ_{j<i} x_j"""
    return jnp.cumsum(_shifted(x), axis=2)


def _shifted(x: Array) -> Array:
    """x of the token before, 0 for the first."""
    return jnp.concatenate([jnp.zeros_like(x[:, :, :1, ...]), x[:, :, :-1, ...]], axis=2)
