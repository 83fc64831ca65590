"""The outputs of all chunks at once, and the part of dU from outputs of the same chunk.

    O = reading ∘ Q S + (D ∘ Q Kᵀ) U,    A = (D ∘ Q Kᵀ)ᵀ dO, summed over the queries of a state.

A program has a chunk and a block of value channels. Scores are recomputed for every block, at 2 C d
FLOPs per token, so that they are not stored.
"""

from __future__ import annotations

import jax.numpy as jnp

from precondattn.arrays import Array
from precondattn_pallas.launch import References
from precondattn_pallas.precision import Products
from precondattn_pallas.recurrence.chunk_arrays import ChunkGrid, ChunkPlan, Rows, each_query, empty
from precondattn_pallas.recurrence.chunk_tiles import decayed, every_block, is_by_channel, scores_of


def read_states(x: References, out: References, *, products: Products, block: int) -> None:
    """The outputs of one query of each token."""
    width = x["q"].shape[1]

    by_channel = "reading" in x and is_by_channel(x, "reading")

    def add(c: Array, total: Array) -> Array:
        q = decayed(x, "q", "reading", slice(None), c) if by_channel else x["q"][:, c]
        return total + products.dot(q, x["state"][c, :])

    result = every_block(width, block, add, jnp.zeros(out["o"].shape, jnp.float32))
    if "reading" in x and not by_channel:
        result = result * x["reading"][...][:, None]
    scores = scores_of(products, x, block)
    out["o"][...] = result + products.dot(scores, x["u"][...])


def read_back(x: References, out: References, *, products: Products, block: int) -> None:
    """A, summed over all queries of a state."""
    total = jnp.zeros(out["local"].shape, jnp.float32)
    for row in range(x["d_o"].shape[0]):
        scores = scores_of(products, x, block, row)
        total = total + products.dot(scores, x["d_o"][row, :, :], left=True)
    out["local"][...] = total


def outputs(plan: ChunkPlan, x: Rows, states: Array, u: Array) -> Array:
    """O (m, r, T, e), from the states before every chunk."""
    m, r, tokens, d = x["q"].shape
    e = u.shape[2]
    width = plan.block("chunk_reads", e)
    grid = ChunkGrid(plan.chunk, tokens // plan.chunk, m * r, e // width)
    inputs = {
        "q": grid.rows(each_query(x["q"])),
        "state": grid.state(states, columns=width),
        "u": grid.rows(u, width),
        **grid.named(x, "reading"),
    }
    if "scores" in x:
        inputs["scores"] = grid.rows(each_query(x["scores"]))
    else:
        inputs |= {"k": grid.rows(x["k"]), **grid.named(x, "g")}
    result = plan.launch(
        read_states,
        "chunk_reads",
        grid.shape,
        inputs,
        {"o": grid.rows(empty(m * r, tokens, e), width)},
        block=plan.block("chunk_reads", d),
    )
    return result["o"].reshape(m, r, tokens, e)


def d_written(plan: ChunkPlan, x: Rows, d_o: Array) -> Array:
    """A (m, T, e), from dO (m, r, T, e)."""
    m, _, tokens, d = x["q"].shape
    e = d_o.shape[3]
    width = plan.block("chunk_reads", e)
    grid = ChunkGrid(plan.chunk, tokens // plan.chunk, m, e // width)
    inputs = {"d_o": grid.group(d_o, width)}
    if "scores" in x:
        inputs["scores"] = grid.group(x["scores"])
    else:
        inputs |= {"q": grid.group(x["q"]), "k": grid.rows(x["k"]), **grid.named(x, "g")}
    result = plan.launch(
        read_back,
        "chunk_reads",
        grid.shape,
        inputs,
        {"local": grid.rows(empty(m, tokens, e), width)},
        block=plan.block("chunk_reads", d),
    )
    return result["local"]
