"""The decay of scores by a forget gate (FoX), for any tile:  D_ij = Σ_{j<τ≤i} g_τ.

For a query of block a and a key of an earlier block c,

    D_ij = (Σ_{τ in a, τ≤i} g_τ) + (Σ_{c<b<a} Σ_{τ in b} g_τ) + (Σ_{τ in c, τ>j} g_τ),

sums of numbers ≤ 0, in which nothing cancels. Within a block the pairs are summed one by one, as in
`precondattn.spec.forget_gate`. Gradient: dg_τ = Σ_{j<τ≤i} dS_ij, the same three parts.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from precondattn.spec import forget_gate
from precondattn_jax.arithmetic import zeros
from precondattn_jax.dot_scores import Sums
from precondattn_jax.layout import QueryBlocks
from precondattn_portable.head_decay import sums_from


class ForgetGate:
    """The decay by gates (b, n, r, s), in whole blocks; `factor` multiplies it."""

    def __init__(self, blocks: QueryBlocks, g: Array, factor: float) -> None:
        self.blocks, self.g, self.factor = blocks, g, factor
        each = jnp.reshape(g, (*g.shape[:3], blocks.keys, blocks.size))
        self.totals = jnp.sum(each, axis=-1)
        """Sums over every block (b, n, r, blocks)."""

    def _between(self, a: Array, j: Array) -> Array:
        block = jnp.arange(self.blocks.keys, dtype="int32")
        return (block > j) & (block < a)

    def add_to(self, tile: Array, a: Array, j: Array, *, diagonal: bool) -> Array:
        """Scores (b, n, r, C, C) plus the decay."""
        row_g, g = self.blocks.take(self.g, a, 3), self.blocks.take(self.g, j, 3)
        if diagonal:
            b, n, r, size = row_g.shape
            row_g = jnp.swapaxes(jnp.reshape(row_g, (b, n * r, size)), 1, 2)
            within = jnp.reshape(forget_gate.decay(row_g, size), (b, n, r, size, size))
            return tile + self.factor * within
        rows = jnp.cumsum(row_g, axis=-1)[..., None]
        between = jnp.sum(jnp.where(self._between(a, j), self.totals, 0.0), axis=-1)
        behind = jnp.concatenate([g[..., 1:], jnp.zeros_like(g[..., :1])], -1)
        columns = sums_from(behind, axis=-1)[..., None, :]
        return tile + self.factor * (rows + between[..., None, None] + columns)

    def sums(self) -> Sums:
        return {"each": zeros(self.g.shape, self.g), "blocks": zeros(self.totals.shape, self.g)}

    def pulled(self, sums: Sums, a: Array, j: Array, d_tile: Array, *, diagonal: bool) -> Sums:
        """The sums plus the gates' gradient from that of a tile (b, n, r, C, C)."""
        blocks, d = self.blocks, self.factor * d_tile
        b, n, r, size, _ = d.shape
        if diagonal:
            d_g = forget_gate.decay_vjp(jnp.reshape(d, (b, n * r, size, size)))
            d_g = jnp.reshape(jnp.swapaxes(d_g, 1, 2), (b, n, r, size))
            return sums | {"each": blocks.add(sums["each"], a, d_g, 3)}
        d_rows = sums_from(jnp.sum(d, axis=-1), axis=-1)
        before = jnp.cumsum(jnp.sum(d, axis=-2), axis=-1)
        # The key at j is not decayed by g_j.
        d_columns = jnp.concatenate([jnp.zeros_like(before[..., :1]), before[..., :-1]], axis=-1)
        each = blocks.add(blocks.add(sums["each"], a, d_rows, 3), j, d_columns, 3)
        d_blocks = sums["blocks"] + jnp.where(self._between(a, j), before[..., -1:], 0.0)
        return {"each": each, "blocks": d_blocks}

    def gradient(self, sums: Sums) -> Array:
        """dg (b, n, r, s)"""
        return sums["each"] + jnp.repeat(sums["blocks"], self.blocks.size, axis=-1)
