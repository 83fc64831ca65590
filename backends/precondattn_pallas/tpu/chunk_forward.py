"""The recurrence in chunks on a TPU: one program per chunk, the state in scratch.

    R = V − reading ∘ K S,    U = M (β ∘ R)  (additive: U = V),
    O = reading ∘ Q S + (D ∘ Q Kᵀ) U,    S ← total ∘ S + Kᵀ (writing ∘ U),

with M = (I + diag(β) stril(D ∘ K Kᵀ))⁻¹ by recursive 2 × 2 block inversion (`chunk_inverse.py`) and

    D_ij = e^{g_{j+1} + … + g_i}  (j ≤ i),    reading_i = e^{g_1 + … + g_i},
    writing_j = e^{g_{j+1} + … + g_C},        total = e^{g_1 + … + g_C}.

Every exponent is the sum of its own gates, as in `chunk_tiles.py`: a strong gate costs the weak
gates after it no accuracy. A TPU has no cumulative sums; those of D are a product with a triangle
of ones, whose terms have one sign. The grid is (heads, chunks), with chunks in order. Blocks of
q, k, v, o and their numbers are loaded and stored per chunk; S, d × e in float32, stays in scratch.

For T tokens of a head and chunks of C: 6 T d e + 4 T C (d + e) FLOPs, and M. Memory is read and
written once; where states are requested, d e numbers are written for every chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from precondattn.arrays import Array
from precondattn_pallas.launch import References
from precondattn_pallas.recurrence.chunk_inverse import unit_lower_inverse
from precondattn_pallas.recurrence.chunk_tiles import tokens_of
from precondattn_pallas.tpu.products import TpuProducts
from precondattn_pallas.tpu.tiles import as_column

BETA, GATE = 0, 1
"""Rows of a chunk's numbers, and of their gradient."""


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


class ChunkWrites(NamedTuple):
    """U, the rows that a chunk writes to the state, and intermediate results."""

    decay: Decay
    u: Array
    beta: Array | None = None
    """(C, 1); this and the following with the delta rule only."""
    strict: Array | None = None
    """stril(D ∘ K Kᵀ)"""
    inverse: Array | None = None
    """M"""
    residual: Array | None = None
    """R"""


def written_of(
    x: References, state: Array, *, products: TpuProducts, delta: bool, gates: bool
) -> ChunkWrites:
    """U, from the state before the chunk."""
    k, v = x["k"][...], x["v"][...]
    size = k.shape[0]
    decay = decay_of(products, x["numbers"][pl.ds(GATE, 1), :] if gates else None, size)
    if not delta:
        return ChunkWrites(decay, v)
    i, j = tokens_of(size)
    beta = as_column(x["numbers"][pl.ds(BETA, 1), :])
    strict = jnp.where(i > j, decay.pairs * products.dot(k, k, right=True), jnp.float32(0))
    inverse = unit_lower_inverse(products, beta * strict)
    residual = v.astype(jnp.float32) - times(decay.reading, products.dot(k, state))
    u = products.dot(inverse, beta * residual)
    return ChunkWrites(decay, u, beta, strict, inverse, residual)


def forward(
    x: References,
    out: References,
    scratch: References,
    *,
    products: TpuProducts,
    delta: bool,
    gates: bool,
) -> None:
    """A chunk's outputs and preceding state, each if requested, and the last state."""
    kept = scratch["state"]

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        kept[...] = x["start"][...]

    state, k = kept[...], x["k"][...]
    if "states" in out:
        out["states"][...] = state
    decay, u, *_ = written_of(x, state, products=products, delta=delta, gates=gates)
    if "o" in out:
        for row in range(x["q"].shape[0]):
            q = x["q"][row]
            scores = decay.pairs * products.dot(q, k, right=True)
            result = times(decay.reading, products.dot(q, state))
            out["o"][row] = result + products.dot(scores, u)
    state = times(decay.total, state) + products.dot(k, times(decay.writing, u), left=True)
    kept[...] = state

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _() -> None:
        out["final"][...] = state
