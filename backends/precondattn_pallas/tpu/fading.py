"""How a chunk's tokens fade, and the gates' gradient, from a row of gates.

    D_ij = e^{g_{j+1} + … + g_i}  (j ≤ i),    reading_i = e^{g_1 + … + g_i},
    writing_j = e^{g_{j+1} + … + g_C},        total = e^{g_1 + … + g_C}.

Every exponent is the sum of the gates it consists of, as in `chunk_tiles.py`: a strong gate costs
the weak ones behind it no digits. A TPU has no running sums, so that those of D are a product with
a triangle of ones, whose terms have one sign.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from precondattn_pallas.recurrence.chunk_tiles import tokens_of
from precondattn_pallas.tpu.products import TpuProducts
from precondattn_pallas.tpu.tiles import as_column


class Fading(NamedTuple):
    """Factors of a chunk; without gates 1, and then None but for D."""

    pairs: Any
    """D (C, C), 0 above the diagonal"""
    reading: Any = None
    """(C, 1)"""
    writing: Any = None
    """(C, 1)"""
    total: Any = None
    """(1, 1)"""


def fading_of(products: TpuProducts, g: Any, size: int) -> Fading:
    """Of a row of gates (1, C), or None."""
    i, j = tokens_of(size)
    zero, one = jnp.float32(0), jnp.float32(1)
    triangle = jnp.where(i >= j, one, zero)
    if g is None:
        return Fading(triangle)
    # Down the column of token j, the gates behind it.
    behind = jnp.where(i > j, as_column(g), zero)
    pairs = triangle * jnp.exp(products.exact.dot(triangle, behind))
    return Fading(
        pairs,
        jnp.exp(jnp.sum(jnp.where(j <= i, g, zero), axis=1, keepdims=True)),
        jnp.exp(jnp.sum(jnp.where(j > i, g, zero), axis=1, keepdims=True)),
        jnp.exp(jnp.sum(g, axis=1, keepdims=True)),
    )


def d_gates(products: TpuProducts, crossing: Any, read: Any, written: Any, kept: Any) -> Any:
    """(1, C), from sums of dx ∘ x of what the gates are factors of.

    Of pairs (C, C): gate t is in those of j < t ≤ i; of what token i reads of the state in front
    (C, 1): i ≥ t; of what token j writes to that behind (C, 1): j < t; and of what the one keeps of
    the other (1, 1).
    """
    i, t = tokens_of(crossing.shape[0])
    zero = jnp.float32(0)
    before = products.exact.dot(crossing, jnp.where(i < t, jnp.float32(1), zero))
    found = jnp.where(i >= t, before + read, written)
    return jnp.sum(found, axis=0, keepdims=True) + kept


def times(factor: Any, rows: Any) -> Any:
    """A factor of tokens times their rows."""
    return rows if factor is None else factor * rows
