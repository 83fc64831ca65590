"""Tiles of LUCID's matrix on a TPU.

    Φ_ij = e^{s r_i r_j ⟨k_i, k_j⟩ − s d} ≤ 1,    r = 1 / rms(k),

0 where i and j belong to different segments. Keys are passed unnormalised, and are normalised in
the products: for keys in bfloat16 these are exact up to float32's rounding, with a single product
of the TPU's matrix unit. The other data of a block's tokens are the rows of its numbers.
"""

from __future__ import annotations

import jax.numpy as jnp

from precondattn.arrays import Array
from precondattn_pallas.lucid.tiles import Phi, segments_of
from precondattn_pallas.tpu.tiles import as_column

BLOCK = 128
"""Tokens of a block."""

FACTOR, RECIPROCAL, SEGMENT = 0, 1, 2
"""Rows of a block's numbers: β or 0, r, and the index of the segment (exact up to 2²⁴)."""


def phi_tile(phi: Phi, i: tuple[Array, Array], j: tuple[Array, Array]) -> Array:
    """Φ of two blocks, each of its keys (BLOCK, d) and its numbers (8, BLOCK)."""
    (i_keys, i_numbers), (j_keys, j_numbers) = i, j
    scores = phi.products.dot(i_keys, j_keys, right=True)
    scores = scores * as_column(row(i_numbers, RECIPROCAL)) * row(j_numbers, RECIPROCAL)
    return phi.weights(scores, as_column(row(i_numbers, SEGMENT)) == row(j_numbers, SEGMENT))


def reach_of(ids: Array, tokens: int) -> Array:
    """The first and the last block (b, blocks, 2) that share a segment with each block.

    The ids (b, s) are padded to T tokens. The result is flat, int32; None without segments.
    """
    segments = segments_of(ids, tokens)
    if segments is None:
        return None
    first = segments.begin[:, ::BLOCK] // BLOCK
    last = (segments.end[:, BLOCK - 1 :: BLOCK] - 1) // BLOCK
    return jnp.stack([first, last], axis=2).reshape(-1)


def row(numbers: Array, which: int) -> Array:
    """One row (1, BLOCK) of a block's numbers (8, BLOCK)."""
    return numbers[which : which + 1, :]
