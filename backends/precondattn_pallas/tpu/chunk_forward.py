"""The recurrence in chunks on a TPU: one program per chunk, the state in scratch.

    R = V − reading ∘ K S,    U = M (β ∘ R)  (additive: U = V),
    O = reading ∘ Q S + (D ∘ Q Kᵀ) U,    S ← total ∘ S + Kᵀ (writing ∘ U),

with D and the factors of `decay.py` and M = (I + diag(β) stril(D ∘ K Kᵀ))⁻¹ by recursive 2 × 2
block inversion (`chunk_inverse.py`). The grid is (heads, chunks), with chunks in order. Blocks of
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
from precondattn_pallas.tpu.decay import Decay, decay_of, times
from precondattn_pallas.tpu.products import TpuProducts
from precondattn_pallas.tpu.tiles import as_column

BETA, GATE = 0, 1
"""Rows of a chunk's numbers, and of their gradient."""


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
