"""Tiles of 16 tokens, the fewest that a product takes, whose channels each have their own decay.

    F(A, q, k) = Σ_{j≤i,c} A_ij q_ic k_jc D_ijc,    D_ijc = e^{g_{j+1,c} + … + g_ic}

D is a factor of every channel of a product and not of the product, and so pairs of tokens are cut
into squares in which it factors. Between two tiles, relative to the last token in front of the
later one,

    D_ijc = since_ic between_c until_jc,    since_i = e^{g_1 + … + g_i},
    until_j = e^{g_{j+1} + … + g_16}

by the gates of the tokens' own tiles, and `between` by those of the tiles in between. Within a
tile, these are the squares of the second half of a block of tokens with the first, for blocks of
2, 4, 8 and 16; relative to the middle of the block

    D_ijc = f_ic f_jc,    f = e^{E g},

with E_it = 1 where gate t stands between token i and the middle. All exponents are ≤ 0, and none is
a difference of sums (`chunk_tiles.py`). What a pair adds to F is its part of the gradient of every
gate between its tokens: with w_i = Σ_j of what it adds for either token, dg = Eᵀ w.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp

from precondattn_pallas.precision import Products
from precondattn_pallas.recurrence.chunk_tiles import tokens_of

TILE = 16


class Halving(NamedTuple):
    """Blocks of tokens, each with a second half and a first."""

    gates: Any
    """E (16, 16)."""
    fade: Any
    """f (16, w)."""
    is_pair: Any
    """(16, 16): the token of the row is in the second half, that of the column in the first."""


def since_of(products: Products, g: Any) -> Any:
    return jnp.exp(products.exact.dot(_until(), g))


def until_of(products: Products, g: Any) -> Any:
    return jnp.exp(products.exact.dot(_behind(), g))


def d_gates_of(products: Products, since: Any, until: Any) -> Any:
    """dg (16, w), from the sums of dx ∘ x of what since and until are factors of."""
    exact = products.exact
    return exact.dot(_until(), since, left=True) + exact.dot(_behind(), until, left=True)


def _until() -> Any:
    """The gates up to token i: those of `since`."""
    i, t = tokens_of(TILE)
    return (t <= i).astype(jnp.float32)


def _behind() -> Any:
    """The gates behind token i."""
    i, t = tokens_of(TILE)
    return (t > i).astype(jnp.float32)


def _halvings(products: Products, g: Any) -> Iterator[Halving]:
    i, t = tokens_of(TILE)
    for level in range(TILE.bit_length() - 1):
        i_half, t_half = i >> level, t >> level
        is_second = (i_half & 1) == 1
        is_between = (i_half == t_half) & ((is_second & (t <= i)) | (~is_second & (t > i)))
        gates = is_between.astype(jnp.float32)
        fade = jnp.exp(products.exact.dot(gates, g))
        yield Halving(gates, fade, is_second & (i_half == t_half + 1))


def scores_within(products: Products, q: Any, k: Any, g: Any) -> Any:
    """dF/dA of a tile, 0 above the diagonal: of q, k and g in float32 (16, w)."""
    i, j = tokens_of(TILE)
    found = jnp.where(i == j, jnp.sum(q * k, axis=1)[:, None], jnp.float32(0))
    for _, fade, is_pair in _halvings(products, g):
        square = products.dot(q * fade, k * fade, right=True)
        found = found + jnp.where(is_pair, square, jnp.float32(0))
    return found


def read_within(products: Products, a: Any, k: Any, g: Any) -> Any:
    """dF/dq of a tile, from the lower part of A."""
    found = _diagonal(a) * k
    for _, fade, is_pair in _halvings(products, g):
        square = jnp.where(is_pair, a, jnp.float32(0))
        found = found + fade * products.dot(square, k * fade)
    return found


def gradients_within(products: Products, a: Any, q: Any, k: Any, g: Any) -> tuple[Any, Any, Any]:
    """dF/dq, dF/dk and dF/dg of a tile."""
    diagonal = _diagonal(a)
    d_q, d_k, d_g = diagonal * k, diagonal * q, jnp.zeros_like(g)
    for gates, fade, is_pair in _halvings(products, g):
        square = jnp.where(is_pair, a, jnp.float32(0))
        later, earlier = q * fade, k * fade
        read, written = products.dot(square, earlier), products.dot(square, later, left=True)
        crossing = read * later + written * earlier
        d_q, d_k = d_q + read * fade, d_k + written * fade
        d_g = d_g + products.exact.dot(gates, crossing, left=True)
    return d_q, d_k, d_g


def _diagonal(a: Any) -> Any:
    i, j = tokens_of(TILE)
    return jnp.sum(jnp.where(i == j, a, jnp.float32(0)), axis=1)[:, None]
