"""The decay of scores by a forget gate (FoX), row block by row block:  D_ij = Σ_{j<τ≤i} g_τ.

For a block of queries that begins at position p, and preceding keys j < p,

    D_ij = (Σ_{p≤τ≤i} g_τ) + (Σ_{j<τ<p} g_τ).

The first sum depends on the row only. The second depends on the column only, and is carried from
block to block. Both are sums of numbers ≤ 0, so nothing cancels, unlike in a difference of
cumulative sums. Pairs within the block are summed one by one, as in `spec/forget_gate.py`.

Gradient: dg_τ = Σ_{j<τ≤i} dS_ij, in the same three parts.

A forget gate is causal, and a query attends to itself: the keys of a block end with its last query.
"""

from __future__ import annotations

from precondattn.arrays import Array, Arrays, namespace
from precondattn.spec import forget_gate
from precondattn_portable.arithmetic import Scratch, changed_at
from precondattn_portable.head_decay import sums_from
from precondattn_portable.layout import Tile, by_query_head
from precondattn_portable.scores import Scores


class ForgetGate:
    """Scores plus the decay of a group of heads, g (b, n, r, s).

    Tiles come in order of time. The first query is at position `offset`.
    """

    def __init__(
        self, scores: Scores, g: Array, factor: float, offset: int, *, gradient: bool
    ) -> None:
        self.ops, self.scores, self.g = scores.ops, scores, g
        self.factor, self.offset = factor, offset
        self.since = self.ops.zeros(g.shape, g)
        """Σ_{j<τ<p} g_τ of every key j before p."""
        self.position = 0
        if gradient:
            self.d_g = self.ops.zeros(g.shape, g)

    def row_block(self, tile: Tile, workspace: Scratch) -> Array:
        row_block = self.scores.row_block(tile, workspace)
        p0, p1, low = self.offset + tile.i0, self.offset + tile.i1, tile.low
        self._advance(p0)
        xp, pairs = namespace(row_block), by_query_head(self.ops, row_block, p1 - p0)
        if low < p0:
            rows = xp.cumulative_sum(self.g[..., p0:p1], axis=-1)[..., None]
            columns = self.since[..., low:p0][..., None, :]
            changed_at(self.ops.add, pairs, (..., slice(p0 - low)), self.factor * (rows + columns))
        changed_at(
            self.ops.add, pairs, (..., slice(p0 - low, None)), self.factor * self._within(p0, p1)
        )
        return xp.reshape(pairs, row_block.shape)

    def pull(self, tile: Tile, d_row_block: Array) -> None:
        self.scores.pull(tile, d_row_block)
        p0, p1, low = self.offset + tile.i0, self.offset + tile.i1, tile.low
        xp, d_pairs = namespace(d_row_block), by_query_head(self.ops, d_row_block, p1 - p0)
        if low < p0:
            d_old = self.factor * d_pairs[..., : p0 - low]
            d_rows = sums_from(xp.sum(d_old, axis=-1), axis=-1)
            self.d_g[..., p0:p1] = self.d_g[..., p0:p1] + d_rows
            d_columns = xp.cumulative_sum(xp.sum(d_old, axis=-2), axis=-1)
            # The key at j is not decayed by g_j.
            self.d_g[..., low + 1 : p0] = self.d_g[..., low + 1 : p0] + d_columns[..., :-1]
        d_new = self.factor * d_pairs[..., p0 - low :]
        b, n, r, t, s = d_new.shape
        d_g = forget_gate.decay_vjp(xp.reshape(d_new, (b, n * r, t, s)))
        d_g = xp.reshape(xp.permute_dims(d_g, (0, 2, 1)), (b, n, r, s))
        self.d_g[..., p0:p1] = self.d_g[..., p0:p1] + d_g

    def gradients(self) -> Arrays:
        return {**self.scores.gradients(), "g": self.d_g}

    def _within(self, p0: int, p1: int) -> Array:
        xp = namespace(self.g)
        b, n, r, _ = self.g.shape
        g = xp.reshape(self.g[..., p0:p1], (b, n * r, p1 - p0))
        each = forget_gate.decay(xp.permute_dims(g, (0, 2, 1)), p1 - p0)
        return xp.reshape(each, (b, n, r, p1 - p0, p1 - p0))

    def _advance(self, p0: int) -> None:
        """Advance the column sums to p0, where the next block of queries begins."""
        if p0 == self.position:
            return
        start, new = self.position, self.g[..., self.position : p0]
        # Σ_{j<τ<p0} g_τ of the new keys j.
        after = sums_from(new, axis=-1)
        if start:
            self.since[..., :start] = self.since[..., :start] + after[..., :1]
        self.since[..., start : p0 - 1] = after[..., 1:]
        self.position = p0
