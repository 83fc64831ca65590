"""CCQ with covariances over each query's visible keys, one row block of scores at a time.

    q^c = q̄ − λ c,    c = (p ∘ s̃) k̄,    p = softmax(s / τ),    s̃ = s − Σ p s,    s = q̄ k̄ᵀ

Backward, with h = −λ g and u = h k̄ᵀ on the same row block (`spec/query_weighted.py`):

    ds = p ∘ ũ + p ∘ (s̃ ∘ ũ − Σ p s̃ ũ) / τ,    dq̄ = g + ds k̄,    dk̄ = (p ∘ s̃)ᵀ h + dsᵀ q̄.
"""

from __future__ import annotations

from collections.abc import Iterator

import precondattn as pa
from precondattn.arrays import Array, Arrays, Residuals, namespace
from precondattn.cache import Updates
from precondattn.frame import Frame
from precondattn.spec.array_functions import row_sum, transpose
from precondattn.spec.l2_norm import l2_norm, l2_norm_vjp
from precondattn_portable.algorithm import Algorithm
from precondattn_portable.extension import step_as_defined
from precondattn_portable.layout import (
    Part,
    Tile,
    block_size,
    grouped_queries,
    head_groups,
    time_first,
    ungrouped,
    zero_padding,
)
from precondattn_portable.masks import Mask
from precondattn_portable.read_mean import exponentials


class QueryWeighted(Algorithm[pa.QueryWeightedQuery]):
    """Algorithm of `QueryWeightedQuery`."""

    name = "row blocks"

    def _row_blocks(
        self, q: Array, k: Array, frame: Frame
    ) -> Iterator[tuple[Part, Tile, Array, Array]]:
        """The heads, the tile, p and s̃ of every block of queries."""
        ops, (b, n, r, t, _), s = self.ops, q.shape, k.shape[2]
        mask, size = Mask(frame.replaced(q_valid=None), s, s - t), block_size(ops.sizes, t, r)
        for part in head_groups(ops.sizes, b, n, 2 * r * size * s):
            group_mask = mask.of_sequences(part[0])
            for tile in mask.tiles(t, size):
                tile = tile._replace(low=0)
                scores = ops.product(tile.rows_of(q, part), transpose(k[part][tile.keys]))
                logits = group_mask.apply(ops, scores / self.leaf.tau, tile)
                p, total, _ = exponentials(ops, logits)
                p = ops.multiply(p, 1.0 / total)
                yield part, tile, p, ops.add(scores, -row_sum(p * scores))

    def _units(self, x: Arrays) -> tuple[Array, Array, Array]:
        """q̄ (b, n, r, t, d), k̄ (b, n, s, d) and λ (b, n, r, t, 1)."""
        ops, n = self.ops, x["k"].shape[2]
        q = grouped_queries(ops, l2_norm(x["q"], self.leaf.eps), n)
        k = ops.heads_first(l2_norm(x["k"], self.leaf.eps))
        return q, k, grouped_queries(ops, x["contraction"][..., None], n)

    def forward(self, x: Arrays, frame: Frame) -> tuple[Array, Residuals]:
        ops = self.ops
        q, k, contraction = self._units(x)
        c = ops.empty(q.shape, q)
        for part, tile, p, centred in self._row_blocks(q, k, frame):
            result = ops.product(ops.multiply(p, centred), k[part][tile.keys])
            where = tile.at(part)
            c[where] = namespace(c).reshape(result, c[where].shape)
        return zero_padding(ungrouped(ops, q - contraction * c), frame), ()

    def backward(
        self, x: Arrays, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        ops, leaf = self.ops, self.leaf
        q, k, contraction = self._units(x)
        xp, n = namespace(q), k.shape[1]
        g = grouped_queries(ops, zero_padding(cotangent, frame), n)
        h = -contraction * g
        d_q, d_k = g + 0, ops.zeros(k.shape, k)
        d_contraction = ops.zeros(contraction.shape, q)
        for part, tile, p, centred in self._row_blocks(q, k, frame):
            keys, where = k[part][tile.keys], tile.at(part)
            rows_q, rows_h = tile.rows_of(q, part), tile.rows_of(h, part)
            u = ops.product(rows_h, transpose(keys))
            u = ops.add(u, -row_sum(p * u))
            weighted = p * centred
            c = ops.product(weighted, keys)
            d_s = p * u + (weighted * u - p * row_sum(weighted * u)) / leaf.tau
            shape = q[where].shape
            d_q[where] = d_q[where] + xp.reshape(ops.product(d_s, keys), shape)
            d_contraction[where] = -row_sum(g[where] * xp.reshape(c, shape))
            d_keys = d_k[part]
            ops.add_product_at(d_keys, tile.keys, transpose(weighted), rows_h)
            ops.add_product_at(d_keys, tile.keys, transpose(d_s), rows_q)
        return {
            "q": l2_norm_vjp(x["q"], leaf.eps, ungrouped(ops, d_q)),
            "k": l2_norm_vjp(x["k"], leaf.eps, time_first(d_k)),
            "contraction": ungrouped(ops, d_contraction)[..., 0],
        }

    def step(self, past: Arrays, x: Arrays, frame: Frame) -> tuple[Array, Updates]:
        return step_as_defined(self.leaf, past, x, frame)
