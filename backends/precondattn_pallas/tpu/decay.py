"""The decay between a chunk's tokens, and the gates' gradient, from a row of gates.

    D_ij = e^{g_{j+1} + … + g_i}  (j ≤ i),    reading_i = e^{g_1 + … + g_i},
    writing_j = e^{g_{j+1} + … + g_C},        total = e^{g_1 + … + g_C}.

Every exponent is the sum of its own gates, as in `chunk_tiles.py`: a strong gate costs the weak
gates after it no accuracy. A TPU has no cumulative sums; those of D are a product with a triangle
of ones, whose terms have one sign.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from precondattn.arrays import Array
from precondattn_pallas.recurrence.chunk_tiles import tokens_of
from precondattn_pallas.tpu.products import TpuProducts
from precondattn_pallas.tpu.tiles import as_column


class Decay(NamedTuple):
    """Factors of a chunk; without gates they are 1, and None except for D."""

    pairs: Array
    """D (C, C), 0 above the diagonal"""
    reading: Array | None = None
    """(C, 1)"""
    writing: Array | None = None
    """(C, 1)"""
    total: Array | None = None
    """(1, 1)"""


def decay_of(products: TpuProducts, g: Array, size: int) -> Decay:
    """The decay of a row of gates (1, C), or of none."""
    i, j = tokens_of(size)
    zero, one = jnp.float32(0), jnp.float32(1)
    triangle = jnp.where(i >= j, one, zero)
    if g is None:
        return Decay(triangle)
    # Column j has the gates of the tokens after j.
    after = jnp.where(i > j, as_column(g), zero)
    pairs = triangle * jnp.exp(products.exact.dot(triangle, after))
    return Decay(
        pairs,
        jnp.exp(jnp.sum(jnp.where(j <= i, g, zero), axis=1, keepdims=True)),
        jnp.exp(jnp.sum(jnp.where(j > i, g, zero), axis=1, keepdims=True)),
        jnp.exp(jnp.sum(g, axis=1, keepdims=True)),
    )


def d_gates(
    products: TpuProducts, crossing: Array, read: Array, written: Array, kept: Array
) -> Array:
    """The gates' gradient (1, C), from sums of dx ∘ x of everything that the gates multiply.

    `crossing` (C, C) has the sums of pairs: gate t is in those with j < t ≤ i. `read` (C, 1) has
    those of token i's reads of the state before the chunk: i ≥ t. `written` (C, 1) has those of
    token j's writes to the state after it: j < t. `kept` (1, 1) is that of the decayed state.
    """
    i, t = tokens_of(crossing.shape[0])
    zero = jnp.float32(0)
    before = products.exact.dot(crossing, jnp.where(i < t, jnp.float32(1), zero))
    result = jnp.where(i >= t, before + read, written)
    return jnp.sum(result, axis=0, keepdims=True) + kept


def times(factor: Array, rows: Array) -> Array:
    """A factor of tokens times their rows."""
    return rows if factor is None else factor * rows
