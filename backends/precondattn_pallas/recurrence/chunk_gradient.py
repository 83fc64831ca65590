"""The gradients of queries and keys, all chunks at once.

    dA = D ∘ dO Uᵀ,    dQ = dA K + reading ∘ dO Sᵀ,
    dK = dAᵀ Q (summed over the queries of a state) + writing ∘ U dSᵀ
         − reading ∘ β ∘ X Sᵀ + (dL ∘ D + its transpose) K,

and if other keys E are erased than K,

    dK = … + (dL ∘ D)ᵀ E,    dE = −reading ∘ β ∘ X Sᵀ + (dL ∘ D) K.

The second line of dK applies to the delta rule only, with X and dL from `delta_rule.py`; S is the
state before the chunk, dS the gradient of the state after it. A program has a chunk and a block of
key channels, and iterates over the value channels. For the gradients of the gates and β, it also
sums the products of these terms with Q or K.
"""

from __future__ import annotations

import jax.numpy as jnp

from precondattn.arrays import Array, Arrays
from precondattn_pallas.launch import References
from precondattn_pallas.precision import Products
from precondattn_pallas.recurrence.chunk_arrays import (
    ChunkGrid,
    ChunkPlan,
    Rows,
    each_query,
    empty,
    of_erased,
)
from precondattn_pallas.recurrence.chunk_tiles import (
    crossing,
    every_block,
    pairs_of,
    products_of_rows,
)


def d_scores(x: References, out: References, *, products: Products, block: int) -> None:
    """dA of one query of each token, and its part of the gates' gradient."""
    pairs = pairs_of(x, x["d_o"].shape[0])
    result = pairs * products_of_rows(products, x["d_o"], x["u"], block)
    out["d_scores"][...] = result
    if "g" in x:
        scores = products_of_rows(products, x["q"], x["k"], block)
        out["crossing"][...] = crossing(result * scores)


def d_queries(x: References, out: References, *, products: Products, block: int) -> None:
    """A block of dQ of one query of each token; with decays for each channel, only dO Sᵀ."""
    result = products_of_rows(products, x["d_o"], x["state"], block)
    if "reading" in x:
        result = result * x["reading"][...][:, None]
        out["read"][...] = jnp.sum(result * x["q"][...].astype(jnp.float32), axis=1)
    if "d_scores" in x:
        result = result + products.dot(x["d_scores"][...], x["k"][...])
    out["d_q"][...] = result


def d_keys_of_states(x: References, out: References, *, products: Products, block: int) -> None:
    """A block of dK; with decays for each channel, only U dSᵀ. And Σ S ∘ dS over value channels."""
    is_delta = "d_right" in x
    (size, width), rows = x["u"].shape, x["d_state"].shape[0]

    def add(c: Array, total: Array) -> Array:
        written, from_state, overlap = total
        state, d_state = x["state"][:, c], x["d_state"][:, c]
        written = written + products.dot(x["u"][:, c], d_state, right=True)
        if is_delta:
            from_state = from_state + products.dot(x["d_right"][:, c], state, right=True)
        return written, from_state, overlap + jnp.sum(state * d_state, axis=1)

    zeros = jnp.zeros((size, rows), jnp.float32)
    start = zeros, zeros if is_delta else jnp.int32(0), jnp.zeros((rows,), jnp.float32)
    result, from_state, overlap = every_block(width, block, add, start)
    out["overlap"][...] = overlap
    if "writing" in x:
        result = result * x["writing"][...][:, None]
        out["written"][...] = jnp.sum(result * x["k"][...].astype(jnp.float32), axis=1)
    if "d_scores" in x:
        for row in range(x["q"].shape[0]):
            d_scores, q = x["d_scores"][row, :, :], x["q"][row, :, :]
            result = result + products.dot(d_scores, q, left=True)
    if is_delta:
        k = x["k"][...]
        erase = x["erase"][...] if "erase" in x else k
        if "reading" in x:
            from_state = from_state * x["reading"][...][:, None]
        out["from_keys"][...] = jnp.sum(from_state * erase.astype(jnp.float32), axis=1)
        from_state = x["beta"][...][:, None] * from_state
        if "erase" in x:
            out["d_erase"][...] = products.dot(x["d_keys"][...], k) - from_state
            result = result + products.dot(x["d_keys"][...], erase, left=True)
        else:
            result = result - from_state
            result = result + products.dot(x["d_keys"][...], k)
    out["d_k"][...] = result


def of_scores(plan: ChunkPlan, x: Rows, u: Array, d_o: Array) -> Arrays:
    """dA (m, r, T, C) as d_scores; with gates, crossing (m, r, T)."""
    m, r, tokens, e = d_o.shape
    grid = ChunkGrid(plan.chunk, tokens // plan.chunk, m * r)
    inputs = {"d_o": grid.rows(each_query(d_o)), "u": grid.rows(u)}
    outputs = {"d_scores": grid.rows(empty(m * r, tokens, plan.chunk))}
    if "g" in x:
        inputs |= {"q": grid.rows(each_query(x["q"])), "k": grid.rows(x["k"])}
        inputs |= grid.named(x, "g")
        outputs["crossing"] = grid.numbers(empty(m * r, tokens))
    result = plan.launch(
        d_scores,
        "chunk_scores_gradient",
        grid.shape,
        inputs,
        outputs,
        block=plan.block("chunk_scores_gradient", min(x["k"].shape[2], e)),
    )
    return {name: array.reshape(m, r, *array.shape[1:]) for name, array in result.items()}


def of_queries(plan: ChunkPlan, x: Rows, d_o: Array, states: Array) -> Arrays:
    """dQ (m, r, T, d) as d_q; with gates, Σ Q ∘ dQ over channels as read (m, r, T).

    If x has no d_scores (dA), dQ is only dO Sᵀ.
    """
    (m, r, tokens, e), d = d_o.shape, states.shape[2]
    width = plan.block("chunk_query_gradient", d)
    grid = ChunkGrid(plan.chunk, tokens // plan.chunk, m * r, d // width)
    inputs = {"d_o": grid.rows(each_query(d_o)), "state": grid.state(states, rows=width)}
    outputs = {"d_q": grid.rows(empty(m * r, tokens, d), width)}
    if "d_scores" in x:
        inputs["d_scores"] = grid.rows(each_query(x["d_scores"]))
        inputs["k"] = grid.rows(x["k"], width)
        if "g" in x:
            inputs |= {"q": grid.rows(each_query(x["q"]), width), **grid.named(x, "reading")}
            outputs["read"] = grid.sums(empty(m * r, d // width, tokens))
    result = plan.launch(
        d_queries,
        "chunk_query_gradient",
        grid.shape,
        inputs,
        outputs,
        block=plan.block("chunk_query_gradient", e),
    )
    gradients = {"d_q": result["d_q"].reshape(m, r, tokens, d)}
    if "read" in result:
        gradients["read"] = jnp.sum(result["read"], axis=1).reshape(m, r, tokens)
    return gradients


def of_keys(plan: ChunkPlan, x: Rows, states: Array, u: Array, d_states: Array) -> Arrays:
    """dK (m, T, d) as d_k, dE as d_erase where E is not K, overlap (m, chunks, d), and sums (m, T).

    The sums are of K or E with parts of their gradients: `written` with gates, and `from_keys` with
    the delta rule. x has d_scores, and with the delta rule d_right and d_keys. Without d_scores, dK
    is only U dSᵀ.
    """
    m, tokens, d = x["k"].shape
    e = u.shape[2]
    width = plan.block("chunk_key_gradient", d)
    blocks, count = d // width, tokens // plan.chunk
    grid = ChunkGrid(plan.chunk, count, m, blocks)
    inputs = {
        "u": grid.rows(u),
        "state": grid.state(states, rows=width),
        "d_state": grid.state(d_states, rows=width),
    }
    outputs = {
        "d_k": grid.rows(empty(m, tokens, d), width),
        "overlap": grid.state_rows(empty(m, count, d), width),
    }
    sums = []
    if "d_scores" in x:
        inputs["d_scores"] = grid.group(x["d_scores"])
        inputs |= {"q": grid.group(x["q"], width), "k": grid.rows(x["k"], width)}
        inputs |= grid.named(x, "writing")
        sums += ["written"] if "writing" in x else []
    if "d_right" in x:
        inputs |= {name: grid.rows(x[name]) for name in ("d_right", "d_keys")}
        inputs |= grid.named(of_erased(x), "reading", "beta")
        sums.append("from_keys")
        if "erase" in x:
            inputs["erase"] = grid.rows(x["erase"], width)
            outputs["d_erase"] = grid.rows(empty(m, tokens, d), width)
    outputs |= {name: grid.sums(empty(m, blocks, tokens)) for name in sums}
    result = plan.launch(
        d_keys_of_states,
        "chunk_key_gradient",
        grid.shape,
        inputs,
        outputs,
        block=plan.block("chunk_key_gradient", e),
    )
    return result | {name: jnp.sum(result[name], axis=1) for name in sums}
