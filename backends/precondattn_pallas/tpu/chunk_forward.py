"""The recurrence in chunks on a TPU: all of a chunk by one program, the state in scratch.

    R = V − reading ∘ K S,    U = M (β ∘ R)  (additive: U = V),
    O = reading ∘ Q S + (D ∘ Q Kᵀ) U,    S ← total ∘ S + Kᵀ (writing ∘ U),

with D and the factors of `fading.py` and M = (I + diag(β) stril(D ∘ K Kᵀ))⁻¹ by recursive 2 × 2
block inversion (`chunk_inverse.py`). The grid is (heads, chunks), the second in order. Of a chunk's
blocks q, k, v, o and their numbers come and go; S, d × e in float32, stays.

For T tokens of a head and chunks of C: 6 T d e + 4 T C (d + e) FLOPs, and M; memory is read and
written once, and where states are asked for, one of d e numbers for every chunk is written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from precondattn_pallas.recurrence.chunk_inverse import unit_lower_inverse
from precondattn_pallas.recurrence.chunk_tiles import tokens_of
from precondattn_pallas.tpu.fading import Fading, fading_of, times
from precondattn_pallas.tpu.products import TpuProducts
from precondattn_pallas.tpu.tiles import as_column

BETA, GATE = 0, 1
"""Rows of a chunk's numbers, and of their gradient."""


class Written(NamedTuple):
    """What a chunk writes, and what that comes of."""

    fading: Fading
    u: Any
    beta: Any = None
    """(C, 1), and what follows, by the delta rule only."""
    strict: Any = None
    """stril(D ∘ K Kᵀ)"""
    inverse: Any = None
    """M"""
    residual: Any = None
    """R"""


def written_of(x: Any, state: Any, *, products: TpuProducts, delta: bool, gates: bool) -> Written:
    """U, from the state in front of the chunk."""
    k, v = x["k"][...], x["v"][...]
    size = k.shape[0]
    fading = fading_of(products, x["numbers"][pl.ds(GATE, 1), :] if gates else None, size)
    if not delta:
        return Written(fading, v)
    i, j = tokens_of(size)
    beta = as_column(x["numbers"][pl.ds(BETA, 1), :])
    strict = jnp.where(i > j, fading.pairs * products.dot(k, k, right=True), jnp.float32(0))
    inverse = unit_lower_inverse(products, beta * strict)
    residual = v.astype(jnp.float32) - times(fading.reading, products.dot(k, state))
    u = products.dot(inverse, beta * residual)
    return Written(fading, u, beta, strict, inverse, residual)


def forward(
    x: Any, out: Any, scratch: Any, *, products: TpuProducts, delta: bool, gates: bool
) -> None:
    """A chunk's outputs, if they are wanted, the state in front of it, if it is, and the last."""
    kept = scratch["state"]

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        kept[...] = x["start"][...]

    state, k = kept[...], x["k"][...]
    if "states" in out:
        out["states"][...] = state
    fading, u, *_ = written_of(x, state, products=products, delta=delta, gates=gates)
    if "o" in out:
        for row in range(x["q"].shape[0]):
            q = x["q"][row]
            scores = fading.pairs * products.dot(q, k, right=True)
            found = times(fading.reading, products.dot(q, state))
            out["o"][row] = found + products.dot(scores, u)
    state = times(fading.total, state) + products.dot(k, times(fading.writing, u), left=True)
    kept[...] = state

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _() -> None:
        out["final"][...] = state
