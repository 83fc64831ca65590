"""The gradient of the recurrence in chunks on a TPU: from the last chunk on, dS in scratch.

With S before a chunk, dS after it, and U, R, M, D and the factors as in `chunk_forward.py`,

    dU = (D ∘ Q Kᵀ)ᵀ dO + writing ∘ K dS,    X = Mᵀ dU,    dA = D ∘ dO Uᵀ,
    dQ = dA K + reading ∘ dO Sᵀ,
    dK = dAᵀ Q + writing ∘ U dSᵀ − reading ∘ β ∘ X Sᵀ + (F + Fᵀ) K,    F = −β ∘ D ∘ stril(X Uᵀ),
    dV = β ∘ X,    dβ = Σ X ∘ (R − stril(D ∘ K Kᵀ) U),
    dS ← total ∘ dS + Qᵀ (reading ∘ dO) − Kᵀ (reading ∘ β ∘ X);

additive: X = dU, dV = dU, and no terms of X in dK and dS. Sums over the queries of a state are not
written out. The gradient of a gate is that of all exponents that contain it (`d_gates`). The grid
is (heads, chunks), with chunks from the last to the first; M and U are recomputed.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental import pallas as pl

from precondattn.arrays import Array
from precondattn_pallas.launch import References
from precondattn_pallas.recurrence.chunk_tiles import tokens_of
from precondattn_pallas.tpu.chunk_forward import d_gates, times, written_of
from precondattn_pallas.tpu.products import TpuProducts
from precondattn_pallas.tpu.tiles import as_row, tile_of


def backward(
    x: References,
    out: References,
    scratch: References,
    *,
    products: TpuProducts,
    delta: bool,
    gates: bool,
) -> None:
    """The gradients of a chunk's q, k, v and numbers, and of the state before the first chunk."""
    kept = scratch["d_state"]

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        kept[...] = x["end"][...]

    dot, d_state, state, k = products.dot, kept[...], x["state"][...], x["k"][...]
    chunk = written_of(x, state, products=products, delta=delta, gates=gates)
    pairs, reading, writing, total = chunk.decay

    of_k = times(writing, dot(k, d_state))
    d_u = of_k
    d_k = times(writing, dot(chunk.u, d_state, right=True))
    next_state = times(total, d_state)
    size = k.shape[0]
    crossing, d_reads = jnp.zeros((size, size), jnp.float32), jnp.zeros((size, 1), jnp.float32)
    for row in range(x["q"].shape[0]):
        q, d_o = x["q"][row], x["d_o"][row]
        q_k = dot(q, k, right=True)
        d_u = d_u + dot(pairs * q_k, d_o, left=True)
        d_scores = pairs * dot(d_o, chunk.u, right=True)
        from_state = times(reading, dot(d_o, state, right=True))
        out["d_q"][row] = dot(d_scores, k) + from_state
        d_k = d_k + dot(d_scores, q, left=True)
        next_state = next_state + dot(q, times(reading, d_o), left=True)
        crossing = crossing + d_scores * q_k
        d_reads = d_reads + _sum(from_state * q)
    written = _sum(of_k * chunk.u)
    numbers = jnp.zeros((1, size), jnp.float32)
    d_v = d_u
    if delta:
        i, j = tokens_of(size)
        right = dot(chunk.inverse, d_u, left=True)
        d_v = chunk.beta * right
        of_system = -jnp.where(i > j, dot(d_v, chunk.u, right=True), jnp.float32(0))
        of_pairs = of_system * pairs
        from_state = times(reading, dot(d_v, state, right=True))
        d_k = d_k + dot(of_pairs, k) + dot(of_pairs, k, left=True) - from_state
        next_state = next_state - dot(k, times(reading, d_v), left=True)
        crossing = crossing + of_system * chunk.strict
        d_reads = d_reads - _sum(from_state * k)
        numbers = as_row(_sum(right * (chunk.residual - dot(chunk.strict, chunk.u))))
    out["d_k"][...] = d_k
    out["d_v"][...] = d_v
    rows = [numbers]
    if gates:
        overlap = total * jnp.sum(_sum(state * d_state), axis=0, keepdims=True)
        rows.append(d_gates(products, crossing, d_reads, written, overlap))
    out["d_numbers"][...] = tile_of(rows)
    kept[...] = next_state

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _() -> None:
        out["d_start"][...] = next_state


def _sum(rows: Array) -> Array:
    """The sum over channels, as a column."""
    return jnp.sum(rows, axis=1, keepdims=True)
