"""What the delta rule writes in a chunk, as a function of the preceding state: U = Y − W S.

    Y = M (β ∘ V),    W = M (β ∘ reading ∘ K),    M = (I + diag(β) stril(D ∘ K Kᵀ))⁻¹

(`chunk_inverse.py`). Backward, with X = Mᵀ dU,

    dV = β ∘ X,    dβ = Σ X ∘ (V − L U) − the state's part from `chunk_gradient.py`,
    dL = −stril((β ∘ X) Uᵀ),    dK = (dL ∘ D + its transpose) K + …,    L = stril(D ∘ K Kᵀ).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from precondattn_pallas.precision import Products
from precondattn_pallas.recurrence.chunk_arrays import Grid, Plan, Rows, empty
from precondattn_pallas.recurrence.chunk_inverse import inverses
from precondattn_pallas.recurrence.chunk_tiles import (
    crossing,
    every_block,
    pairs_of,
    products_of_rows,
)


def prepare(x: Any, out: Any, *, products: Products, block: int) -> None:
    """Y and W of a chunk."""
    solve = x["inverse"][...] * x["beta"][...][None, :]

    def multiply(name: str, solve: Any, result: str) -> None:
        def add(c: Any, done: Any) -> Any:
            out[result][:, c] = products.dot(solve, x[name][:, c])
            return done

        every_block(x[name].shape[1], block, add, jnp.int32(0))

    multiply("v", solve, "y")
    if "reading" in x:
        solve = solve * x["reading"][...][None, :]
    multiply("k", solve, "w")


def d_keys(x: Any, out: Any, *, products: Products, block: int) -> None:
    """X, the factor of K in dK, and the chunk's own part of the gradients of β and of the gates."""
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
    result = -beta * among
    out["d_keys"][...] = result + jnp.transpose(result)
    own = among * products_of_rows(products, x["k"], x["k"], block)
    out["d_beta"][...] = d_beta - jnp.sum(own, axis=1)
    if "g" in x:
        out["crossing"][...] = crossing(-beta * own)


def prepared(plan: Plan, x: Rows) -> dict[str, Any]:
    """Y (m, T, e), W (m, T, d) and M (m, T, C) of all chunks, as y, w and inverse."""
    (m, tokens, d), e = x["k"].shape, x["v"].shape[2]
    grid = Grid(plan.chunk, tokens // plan.chunk, m)
    inverse = inverses(plan, x)
    result = plan.launch(
        prepare,
        "delta_prepare",
        grid.shape,
        {
            "k": grid.rows(x["k"]),
            "v": grid.rows(x["v"]),
            "inverse": grid.rows(inverse),
            **grid.named(x, "beta", "reading"),
        },
        {"y": grid.rows(empty(m, tokens, e)), "w": grid.rows(empty(m, tokens, d))},
        block=plan.block("delta_prepare", min(d, e)),
    )
    return {**result, "inverse": inverse}


def d_written(plan: Plan, x: Rows, u: Any, d_u: Any) -> dict[str, Any]:
    """X (m, T, e) as d_right, d_keys (m, T, C), d_beta (m, T); with gates, crossing (m, T)."""
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
            **grid.named(x, "beta", "g"),
        },
        {
            "d_right": grid.rows(empty(m, tokens, e)),
            "d_keys": grid.rows(empty(m, tokens, plan.chunk)),
            **{name: grid.numbers(empty(m, tokens)) for name in numbers},
        },
        block=plan.block("delta_keys", min(x["k"].shape[2], e)),
    )
