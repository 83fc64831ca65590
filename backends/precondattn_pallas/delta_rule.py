"""What the delta rule writes in a chunk, as a function of the state in front of it: U = Y − W S.

    M = (I + diag(β) stril(D ∘ K Kᵀ))⁻¹,    Y = M (β ∘ V),    W = M (β ∘ reading ∘ K)

and backward, with X = Mᵀ dU,

    dV = β ∘ X,    dβ = Σ X ∘ (V − L U) − what `chunk_gradient.py` has from the state,
    dL = −stril((β ∘ X) Uᵀ),    dK = (dL ∘ D + its transpose) K + …,    L = stril(D ∘ K Kᵀ).

M comes by recursive 2×2 block inversion,

    [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]],    that is    M ← M − M (L ∘ lower left) M

for blocks of 1, 2, 4 … tokens, in registers and at float32's precision: doubling the Neumann series
instead would lose every digit on keys that nearly coincide.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from precondattn_pallas.chunk_arrays import Grid, Plan, Rows, empty
from precondattn_pallas.chunk_tiles import (
    crossing,
    every_block,
    pairs_of,
    products_of_rows,
    tokens_of,
)
from precondattn_pallas.precision import Products


def unit_lower_inverse(products: Products, strict: Any) -> Any:
    """(I + strict)⁻¹ of a strictly lower triangular tile, a power of two wide."""
    i, j = tokens_of(strict.shape[0])
    zero = jnp.float32(0)
    # Of pairs of rows, where A and B are 1.
    is_pair = ((j & 1) == 0) & (i == j + 1)
    found = jnp.where(i == j, jnp.float32(1), zero) - jnp.where(is_pair, strict, zero)
    for level in range(1, strict.shape[0].bit_length() - 1):
        i_block, j_block = i >> level, j >> level
        is_lower_left = ((j_block & 1) == 0) & (i_block == j_block + 1)
        left = products.exact.dot(found, jnp.where(is_lower_left, strict, zero))
        found = found - products.exact.dot(left, found)
    return found


def prepare(x: Any, out: Any, *, products: Products, block: int) -> None:
    """Y, W and M of a chunk."""
    size, d = x["k"].shape
    beta = x["beta"][...]
    among = products_of_rows(products, x["k"], x["k"], block)
    inverse = unit_lower_inverse(
        products, pairs_of(x, size, strict=True) * among * beta[:, None]
    )
    out["inverse"][...] = inverse
    solve = inverse * beta[None, :]

    def values(c: Any, _: Any) -> Any:
        out["y"][:, c] = products.dot(solve, x["v"][:, c])
        return _

    every_block(x["v"].shape[1], block, values, jnp.int32(0))
    if "reading" in x:
        solve = solve * x["reading"][...][None, :]

    def keys(c: Any, _: Any) -> Any:
        out["w"][:, c] = products.dot(solve, x["k"][:, c])
        return _

    every_block(d, block, keys, jnp.int32(0))


def d_keys(x: Any, out: Any, *, products: Products, block: int) -> None:
    """X, what K is multiplied with for dK, and the chunk's own part of dβ and of the gates'."""
    size = x["k"].shape[0]
    inverse = x["inverse"][...]

    def add(c: Any, total: Any) -> Any:
        among, d_beta = total
        right = products.dot(inverse, x["d_u"][:, c], left=True)
        out["d_right"][:, c] = right
        among = among + products.dot(right, x["u"][:, c], right=True)
        return among, d_beta + jnp.sum(right * x["v"][:, c].astype(jnp.float32), axis=1)

    start = jnp.zeros((size, size), jnp.float32), jnp.zeros((size,), jnp.float32)
    among, d_beta = every_block(x["u"].shape[1], block, add, start)
    among = among * pairs_of(x, size, strict=True)
    beta = x["beta"][...][:, None]
    found = -beta * among
    out["d_keys"][...] = found + jnp.transpose(found)
    own = among * products_of_rows(products, x["k"], x["k"], block)
    out["d_beta"][...] = d_beta - jnp.sum(own, axis=1)
    if "g" in x:
        out["crossing"][...] = crossing(-beta * own)


def prepared(plan: Plan, x: Rows) -> dict[str, Any]:
    """Y (m, T, e), W (m, T, d) and M (m, T, C) of all chunks: y, w and inverse."""
    (m, tokens, d), e = x["k"].shape, x["v"].shape[2]
    grid = Grid(plan.chunk, tokens // plan.chunk, m)
    return plan.launch(
        prepare,
        "delta_prepare",
        grid.shape,
        {
            "k": grid.rows(x["k"]),
            "v": grid.rows(x["v"]),
            **grid.those(x, "beta", "g", "reading"),
        },
        {
            "y": grid.rows(empty(m, tokens, e)),
            "w": grid.rows(empty(m, tokens, d)),
            "inverse": grid.rows(empty(m, tokens, plan.chunk)),
        },
        block=plan.block("delta_prepare", min(d, e)),
    )


def d_written(plan: Plan, x: Rows, u: Any, d_u: Any) -> dict[str, Any]:
    """X (m, T, e), d_keys (m, T, C), d_beta (m, T), and crossing (m, T) where there are gates."""
    m, tokens, e = u.shape
    grid = Grid(plan.chunk, tokens // plan.chunk, m)
    numbers = ("d_beta", "crossing") if "g" in x else ("d_beta",)
    return plan.launch(
        d_keys,
        "delta_keys",
        grid.shape,
        {
            **{name: grid.rows(x[name]) for name in ("k", "v", "inverse")},
            "u": grid.rows(u),
            "d_u": grid.rows(d_u),
            **grid.those(x, "beta", "g"),
        },
        {
            "d_right": grid.rows(empty(m, tokens, e)),
            "d_keys": grid.rows(empty(m, tokens, plan.chunk)),
            **{name: grid.numbers(empty(m, tokens)) for name in numbers},
        },
        block=plan.block("delta_keys", min(x["k"].shape[2], e)),
    )
