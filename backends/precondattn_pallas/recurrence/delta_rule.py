"""The rows U that the delta rule writes in a chunk, from the state S before it: U = Y − W S.

    Y = M (β ∘ V),    W = M (β ∘ reading ∘ E),    M = (I + diag(β) stril(D ∘ E Kᵀ))⁻¹

(`chunk_inverse.py`), with E the keys that are erased, K unless others are given. Backward, with
X = Mᵀ dU,

    dV = β ∘ X,    dβ = Σ X ∘ (V − L U) − the state's part from `chunk_gradient.py`,
    dL = −stril((β ∘ X) Uᵀ),    L = stril(D ∘ E Kᵀ),
    dE = (dL ∘ D) K + …,        dK = (dL ∘ D)ᵀ E + …,

and the sum of both where E is K. Keys that are erased from the state before its decay have the
factor reading_{i−1} in W, and D_{i−1,j} in L. With one decay for each key channel, D is inside the
products: L and the gradients from dL are then computed by `channel_decay.py`.
"""

from __future__ import annotations

import jax.numpy as jnp

from precondattn.arrays import Array, Arrays
from precondattn_pallas.launch import References
from precondattn_pallas.precision import Products
from precondattn_pallas.recurrence.chunk_arrays import ChunkGrid, ChunkPlan, Rows, empty, of_erased
from precondattn_pallas.recurrence.chunk_inverse import inverses
from precondattn_pallas.recurrence.chunk_tiles import (
    crossing,
    decayed,
    every_block,
    is_by_channel,
    pairs_of,
    products_of_rows,
)


def prepare(x: References, out: Array, *, products: Products, block: int) -> None:
    """Y and W of a chunk."""
    solve = x["inverse"][...] * x["beta"][...][None, :]
    by_channel = "reading" in x and is_by_channel(x, "reading")

    def multiply(name: str, solve: Array, result: str, factor: str = "") -> None:
        def add(c: Array, done: Array) -> Array:
            out[result][:, c] = products.dot(solve, decayed(x, name, factor, slice(None), c))
            return done

        every_block(x[name].shape[1], block, add, jnp.int32(0))

    multiply("v", solve, "y")
    if "reading" in x and not by_channel:
        solve = solve * x["reading"][...][None, :]
    multiply("erase" if "erase" in x else "k", solve, "w", "reading" if by_channel else "")


def d_keys(x: References, out: References, *, products: Products, block: int) -> None:
    """X, the factor of K in dK, and the chunk's own part of the gradients of β and of the gates.

    If E is not K, or with one decay for each channel, that factor is dL ∘ D without its transpose.
    """
    size = x["u"].shape[0]
    inverse = x["inverse"][...]

    def add(c: Array, total: Array) -> Array:
        pairs, d_beta = total
        right = products.dot(inverse, x["d_u"][:, c], left=True)
        out["d_right"][:, c] = right
        pairs = pairs + products.dot(right, x["u"][:, c], right=True)
        return pairs, d_beta + jnp.sum(right * x["v"][:, c].astype(jnp.float32), axis=1)

    start = jnp.zeros((size, size), jnp.float32), jnp.zeros((size,), jnp.float32)
    pairs, d_beta = every_block(x["u"].shape[1], block, add, start)
    pairs = pairs * pairs_of(x, size, strict=True)
    beta = x["beta"][...][:, None]
    result = -beta * pairs
    is_sum = "erase" not in x and "among" not in x
    out["d_keys"][...] = result + jnp.transpose(result) if is_sum else result
    if "among" in x:
        scores = pairs * x["among"][...]
    else:
        erase = x["erase" if "erase" in x else "k"]
        scores = pairs * products_of_rows(products, erase, x["k"], block)
    out["d_beta"][...] = d_beta - jnp.sum(scores, axis=1)
    if "g" in x:
        out["crossing"][...] = crossing(-beta * scores, undecayed="preceding" in x)


def prepared(plan: ChunkPlan, x: Rows) -> Arrays:
    """Y (m, T, e), W (m, T, d) and M (m, T, C) of all chunks, as y, w and inverse."""
    (m, tokens, d), e = x["k"].shape, x["v"].shape[2]
    grid = ChunkGrid(plan.chunk, tokens // plan.chunk, m)
    inverse = inverses(plan, x)
    result = plan.launch(
        prepare,
        "delta_prepare",
        grid.shape,
        {
            **grid.named(x, "erase" if "erase" in x else "k", "v"),
            "inverse": grid.rows(inverse),
            **grid.named(of_erased(x), "beta", "reading"),
        },
        {"y": grid.rows(empty(m, tokens, e)), "w": grid.rows(empty(m, tokens, d))},
        block=plan.block("delta_prepare", min(d, e)),
    )
    return {**result, "inverse": inverse}


def d_written(plan: ChunkPlan, x: Rows, u: Array, d_u: Array) -> Arrays:
    """X (m, T, e) as d_right, d_keys (m, T, C), d_beta (m, T); with gates, crossing (m, T)."""
    m, tokens, e = u.shape
    grid = ChunkGrid(plan.chunk, tokens // plan.chunk, m)
    keys, gates = (("among",), ()) if "among" in x else (("k", "erase"), ("g", "preceding"))
    numbers = ("d_beta", "crossing") if gates and "g" in x else ("d_beta",)
    name = "channel_delta_keys" if "among" in x else "delta_keys"
    return plan.launch(
        d_keys,
        name,
        grid.shape,
        {
            **grid.named(x, *keys, "v", "inverse"),
            "u": grid.rows(u),
            "d_u": grid.rows(d_u),
            **grid.named(x, "beta", *gates),
        },
        {
            "d_right": grid.rows(empty(m, tokens, e)),
            "d_keys": grid.rows(empty(m, tokens, plan.chunk)),
            **{name: grid.numbers(empty(m, tokens)) for name in numbers},
        },
        block=plan.block(name, min(x["k"].shape[2], e)),
    )
