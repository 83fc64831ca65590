"""Factors that gates make of a chunk, and the gates' gradient, from a few numbers for each token.

    reading_i = e^{g_1 + … + g_i},    writing_j = e^{g_{j+1} + … + g_C},    total = reading_C

XLA computes these. The gradient of a gate is a sum over what it stands between: pairs of tokens
(`crossing`, from the kernels), a token and the state in front of the chunk, a token and the state
behind it, and both states. Arrays are (m, T, …), of whole chunks.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def factors_of(g: Any, chunk: int) -> dict[str, Any]:
    """reading and writing (m, T) or (m, T, d), and total (m, chunks, 1 or d)."""
    chunks = g.reshape(g.shape[0], -1, chunk, *g.shape[2:])
    reading = jnp.exp(jnp.cumsum(chunks, axis=2))
    total = reading[:, :, -1, ...]
    return {
        "reading": reading.reshape(g.shape),
        "writing": jnp.exp(_behind(chunks)).reshape(g.shape),
        "total": total if g.ndim == 3 else total[..., None],
    }


def d_gates(crossing: Any, read: Any, written: Any, kept: Any, chunk: int) -> Any:
    """From the sums of dx ∘ x of what the gates are factors of.

    Of pairs, already by gate; of what tokens read from the state in front of their chunk and wrote
    to that behind it, by token; and of what the one keeps of the other (m, chunks, …).
    """

    def chunks(array: Any) -> Any:
        return array.reshape(array.shape[0], -1, chunk, *array.shape[2:])

    found = _from(chunks(read)) + _before(chunks(written)) + kept[:, :, None, ...]
    return crossing + found.reshape(crossing.shape)


def _from(x: Any) -> Any:
    """Σ_{j≥i} x_j along a chunk's tokens."""
    return jnp.flip(jnp.cumsum(jnp.flip(x, axis=2), axis=2), axis=2)


def _behind(x: Any) -> Any:
    """Σ_{j>i} x_j"""
    return _from(jnp.concatenate([x[:, :, 1:, ...], jnp.zeros_like(x[:, :, :1, ...])], axis=2))


def _before(x: Any) -> Any:
    """Σ_{j<i} x_j"""
    shifted = jnp.concatenate([jnp.zeros_like(x[:, :, :1, ...]), x[:, :, :-1, ...]], axis=2)
    return jnp.cumsum(shifted, axis=2)
