"""The inverse of the delta rule's system of a chunk.

    M = (I + L)⁻¹,    L = diag(β) stril(D ∘ E Kᵀ)

with E the keys that are erased, K unless others are given; by recursive 2×2 block inversion,

    [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]],    that is    M ← M − M (L ∘ lower left) M

for blocks of 1, 2, 4 … tokens: within each half of the chunk in registers, and then once for the
two halves. It is computed with float32's precision whatever the inputs are. Entries are of order 1
for keys of length 1 and β in [0, 2], but doubling the Neumann series instead would lose all digits
for nearly equal keys. For two halves of h tokens, D of a pair across their boundary is

    D_ij = e^{g_{j+1} + … + g_h} e^{g_{h+1} + … + g_i}.

Keys that are erased from the state before its decay have D_ij without the gate of token i. With one
decay for each key channel, D is inside the product, and the pairs of E and K come from
`channel_decay.py`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from precondattn.arrays import Array
from precondattn_pallas.launch import References
from precondattn_pallas.precision import Products
from precondattn_pallas.recurrence.chunk_arrays import ChunkGrid, ChunkPlan, Rows, empty
from precondattn_pallas.recurrence.chunk_tiles import every_block, pairs_of, tokens_of


def unit_lower_inverse(products: Array, strict: Array) -> Array:
    """(I + strict)⁻¹ of a strictly lower triangular tile, a power of two wide.

    Entries on and above the diagonal are not read; `products` are those of a GPU or of a TPU.
    """
    i, j = tokens_of(strict.shape[0])
    zero = jnp.float32(0)
    # Pairs of rows, where A and B are 1.
    is_pair = ((j & 1) == 0) & (i == j + 1)
    result = jnp.where(i == j, jnp.float32(1), zero) - jnp.where(is_pair, strict, zero)
    for level in range(1, strict.shape[0].bit_length() - 1):
        i_block, j_block = i >> level, j >> level
        is_lower_left = ((j_block & 1) == 0) & (i_block == j_block + 1)
        left = products.exact.dot(result, jnp.where(is_lower_left, strict, zero))
        result = result - products.exact.dot(left, result)
    return result


def invert(x: References, out: References, *, products: Products, block: int) -> None:
    """M of a chunk: its diagonal blocks first."""
    half = out["inverse"].shape[0] // 2
    first, second = pl.ds(0, half), pl.ds(half, half)
    blocks = []
    for rows in (first, second):
        gates = {name: x[name][rows] for name in ("g", "preceding") if name in x}
        system = _among(products, x, rows, rows, block) * pairs_of(gates, half, strict=True)
        inverse = unit_lower_inverse(products, system * x["beta"][rows][:, None])
        out["inverse"][rows, rows] = inverse
        blocks.append(inverse)
    corner = _among(products, x, second, first, block) * x["beta"][second][:, None]
    if "g" in x:
        i, j = tokens_of(half)
        lower_gates = x["g"][second]
        if "preceding" in x:  # Without the gate of the other half's last token.
            is_later = lax.broadcasted_iota(jnp.int32, (half,), 0) > 0
            lower_gates = jnp.where(is_later, x["preceding"][second], jnp.float32(0))
        since = jnp.exp(jnp.cumsum(lower_gates, axis=0))
        after = jnp.where(i > j, x["g"][first][:, None], jnp.float32(0))
        corner = corner * since[:, None] * jnp.exp(jnp.sum(after, axis=0))[None, :]
    exact = products.exact
    out["inverse"][second, first] = -exact.dot(exact.dot(blocks[1], corner), blocks[0])
    out["inverse"][first, second] = jnp.zeros((half, half), jnp.float32)


def _among(products: Products, x: References, i: Array, j: Array, block: int) -> Array:
    """⟨e_i, k_j⟩ between two halves."""
    if "among" in x:
        return x["among"][i, j]
    erase = "erase" if "erase" in x else "k"

    def add(c: Array, total: Array) -> Array:
        return total + products.dot(x[erase][i, c], x["k"][j, c], right=True)

    return every_block(x["k"].shape[1], block, add, jnp.zeros((i.size, j.size), jnp.float32))


def inverses(plan: ChunkPlan, x: Rows) -> Array:
    """M of all chunks (m, T, C); with one decay for each key channel, x has D ∘ E Kᵀ as among."""
    m, tokens, d = x["k"].shape
    names = ("among", "beta") if "among" in x else ("k", "erase", "beta", "g", "preceding")
    grid = ChunkGrid(plan.chunk, tokens // plan.chunk, m)
    result = plan.launch(
        invert,
        "chunk_inverse",
        grid.shape,
        grid.named(x, *names),
        {"inverse": grid.rows(empty(m, tokens, plan.chunk))},
        block=plan.block("chunk_inverse", d),
    )
    return result["inverse"]
