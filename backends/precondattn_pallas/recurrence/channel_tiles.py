"""Tiles of 16 tokens, the smallest size of a product, with one decay for each channel.

    F(A, q, k) = Σ_{j≤i,c} A_ij q_ic k_jc D_ijc,    D_ijc = e^{g_{j+1,c} + … + g_ic}

D multiplies every channel of a product, not the product. So pairs of tokens are partitioned into
squares in which D factors. Between two tiles, relative to the last token before the later tile,

    D_ijc = since_ic between_c until_jc,    since_i = e^{g_1 + … + g_i},
    until_j = e^{g_{j+1} + … + g_16}

with the gates of the tokens' own tiles, and `between` from the gates of the tiles between. Within a
tile, the squares are the second half of a block of tokens with its first half, for blocks of 2, 4,
8 and 16. Relative to the middle of the block

    D_ijc = f_ic f_jc,    f = e^{E g},

with E_it = 1 where gate t is between token i and the middle. All exponents are ≤ 0, and none is a
difference of sums (`chunk_tiles.py`). A pair's contribution to F is also its part of the gradient
of every gate between its tokens: with w_i the sum of contributions of token i, dg = Eᵀ w.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp

from precondattn.arrays import Array
from precondattn_pallas.precision import Products
from precondattn_pallas.recurrence.chunk_tiles import tokens_of

TILE = 16


class HalvedBlocks(NamedTuple):
    """Blocks of tokens, each with a first and a second half."""

    gates: Array
    """E (16, 16)."""
    decay: Array
    """f (16, w)."""
    is_pair: Array
    """(16, 16): true if the row's token is in the second half and the column's in the first."""


def since_of(products: Products, g: Array) -> Array:
    return jnp.exp(products.exact.dot(_until(), g))


def until_of(products: Products, g: Array) -> Array:
    return jnp.exp(products.exact.dot(_after(), g))


def d_gates_of(products: Products, since: Array, until: Array) -> Array:
    """dg (16, w), from the sums of dx ∘ x of everything that `since` and `until` multiply."""
    exact = products.exact
    return exact.dot(_until(), since, left=True) + exact.dot(_after(), until, left=True)


def _until() -> Array:
    """The gates up to token i, which `since` sums."""
    i, t = tokens_of(TILE)
    return (t <= i).astype(jnp.float32)


def _after() -> Array:
    """The gates after token i."""
    i, t = tokens_of(TILE)
    return (t > i).astype(jnp.float32)


def _halvings(products: Products, g: Array) -> Iterator[HalvedBlocks]:
    i, t = tokens_of(TILE)
    for level in range(TILE.bit_length() - 1):
        i_half, t_half = i >> level, t >> level
        is_second = (i_half & 1) == 1
        is_between = (i_half == t_half) & ((is_second & (t <= i)) | (~is_second & (t > i)))
        gates = is_between.astype(jnp.float32)
        decay = jnp.exp(products.exact.dot(gates, g))
        yield HalvedBlocks(gates, decay, is_second & (i_half == t_half + 1))


def scores_within(products: Products, q: Array, k: Array, g: Array) -> Array:
    """dF/dA of a tile, 0 above the diagonal, from q, k and g in float32 (16, w)."""
    i, j = tokens_of(TILE)
    result = jnp.where(i == j, jnp.sum(q * k, axis=1)[:, None], jnp.float32(0))
    for _, decay, is_pair in _halvings(products, g):
        square = products.dot(q * decay, k * decay, right=True)
        result = result + jnp.where(is_pair, square, jnp.float32(0))
    return result


def read_within(products: Products, a: Array, k: Array, g: Array) -> Array:
    """dF/dq of a tile, from the lower triangle of A."""
    result = _diagonal(a) * k
    for _, decay, is_pair in _halvings(products, g):
        square = jnp.where(is_pair, a, jnp.float32(0))
        result = result + decay * products.dot(square, k * decay)
    return result


def gradients_within(
    products: Products, a: Array, q: Array, k: Array, g: Array
) -> tuple[Array, Array, Array]:
    """dF/dq, dF/dk and dF/dg of a tile."""
    diagonal = _diagonal(a)
    d_q, d_k, d_g = diagonal * k, diagonal * q, jnp.zeros_like(g)
    for gates, decay, is_pair in _halvings(products, g):
        square = jnp.where(is_pair, a, jnp.float32(0))
        later, earlier = q * decay, k * decay
        q_sums, k_sums = products.dot(square, earlier), products.dot(square, later, left=True)
        crossing = q_sums * later + k_sums * earlier
        d_q, d_k = d_q + q_sums * decay, d_k + k_sums * decay
        d_g = d_g + products.exact.dot(gates, crossing, left=True)
    return d_q, d_k, d_g


def _diagonal(a: Array) -> Array:
    i, j = tokens_of(TILE)
    return jnp.sum(jnp.where(i == j, a, jnp.float32(0)), axis=1)[:, None]
