"""The gradient of softmax attention in tiles (`tiles.py`), as in flash attention.

Each tile is recomputed from the log-sum-exp λ of its rows, independently of the others:

    A = e^{S − λ},    dS = A ∘ (do vᵀ − D),    D = rowsum(do ∘ o),
    dv = Aᵀ do,    dk = s dSᵀ q,    dq = s dS k.

The loop runs over blocks of keys and, for each, over tiles of queries. dk and dv of a block are
summed over its tiles, dq over the blocks. The bias of distances has the gradient
df_u = Σ_{i' + j = u} dS_i'j.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from precondattn_portable.arithmetic import FlatScratch
from precondattn_portable.layout import Part, Tile, blocks, head_groups
from precondattn_portable.masks import Mask
from precondattn_portable.sizes import ON_CPU
from precondattn_torch.arithmetic import TORCH
from precondattn_torch.by_heads import in_threads
from precondattn_torch.scaled_dot_product import Heads
from precondattn_torch.tiles import KernelTiles

ROWS, KEYS = 128, 1024
"""Queries and keys of a tile"""

TOGETHER = 2**17
"""Scores of the tiles of several heads that are computed together."""

FEW = 2**17
"""Scores of a call that one thread computes."""


class TiledGradient:
    """The gradients of a call: of queries, keys, values, and of the bias of distances."""

    def __init__(
        self,
        tiles: KernelTiles,
        scale: float,
        heads: Heads,
        o: Tensor,
        log_total: Tensor,
        cotangent: Tensor,
    ) -> None:
        self.tiles, self.scale, (self.q, self.k, self.v) = tiles, scale, heads
        self.o, self.log_total, self.d_o = o, log_total, cotangent
        self.of_heads: Heads = tuple(torch.empty_like(a) for a in heads)

    def pull(self) -> Tensor | None:
        """Compute the gradients of heads; returns that of the bias of distances (n, r, t + s)."""
        tiles = self.tiles
        heads, size = tiles.b * tiles.n, min(ROWS // tiles.r, tiles.t)
        self.of_heads[0].zero_()
        few = tiles.b * tiles.h * tiles.t * tiles.s <= FEW
        threads = 1 if few else min(torch.get_num_threads(), heads)
        row_block = tiles.r * size * min(KEYS, tiles.s)
        parts = [
            *head_groups(
                ON_CPU, tiles.b, tiles.n, row_block, min(TOGETHER, heads // threads * row_block)
            )
        ]

        def of_thread(thread: int) -> Tensor | None:
            work = TileWork(self, size)
            for part in parts[thread::threads]:
                work.of_part(part)
            return work.d_f

        d_f = [of_thread(0)] if threads == 1 else in_threads(of_thread, threads)
        return None if tiles.f is None else torch.stack(d_f).sum(0)


class TileWork:
    """The computation of one thread, and its workspace."""

    def __init__(self, call: TiledGradient, size: int) -> None:
        self.call, self.tiles, self.size = call, call.tiles, size
        self.scores, self.d_scores = (FlatScratch(TORCH, 0, call.q) for _ in range(2))
        self.d_f = None if self.tiles.f is None else torch.zeros_like(self.tiles.f)
        self.skewed = call.q.new_empty(0)

    def of_part(self, part: Part) -> None:
        """The gradients of some heads."""
        call, (sequences, heads, _) = self.call, part
        tiles = [p for tile in self.tiles.of_queries(self.size) for p in self.tiles.parts(tile)]
        mask = self.tiles.mask.of_part(part)
        _, d_k, d_v = call.of_heads
        for start, stop in blocks(self.tiles.s, KEYS):
            where = sequences, slice(start, stop), heads
            k, v = (TORCH.heads_first(a[where]) for a in (call.k, call.v))
            sums = torch.zeros_like(k), torch.zeros_like(v)
            for tile in tiles:
                part_tile = tile._replace(low=max(tile.low, start), high=min(tile.high, stop))
                if part_tile.low < part_tile.high:
                    columns = slice(part_tile.low - start, part_tile.high - start)
                    parts = (a[:, :, columns] for a in (k, v, *sums))
                    self._of_tile(part_tile, part, mask, *parts)
            d_k[where], d_v[where] = (a.transpose(1, 2) for a in sums)

    def _of_tile(
        self, tile: Tile, part: Part, mask: Mask, k: Tensor, v: Tensor, d_k: Tensor, d_v: Tensor
    ) -> None:
        """Add a tile's gradients to d_q and d_f, and to d_k and d_v of its keys (b, n, keys, …)."""
        call, tiles = self.call, self.tiles
        of_queries = (call.q, call.d_o, call.o, call.log_total[..., None])
        rows, d_o, o, log_total = (tiles.rows(a, tile, part).flatten(2, 3) for a in of_queries)
        rows, mean = rows * call.scale, (d_o * o).sum(-1, keepdim=True)
        (b, n, count, _), keys = rows.shape, k.shape[2]

        scores = TORCH.product(rows, k.mT, self.scores.shaped((b, n, count, keys)))
        pairs = scores.view(b, n, tiles.r, -1, keys)
        added = tiles.distances(tile, part)
        if added is not None:
            pairs.add_(added)
        for low, high, is_masked in tiles.ranges(tile):
            if is_masked:
                visible = tiles.visible(tile._replace(low=low, high=high), mask)
                pairs[..., low - tile.low : high - tile.low].masked_fill_(~visible, -math.inf)

        weights = TORCH.exp(scores.sub_(log_total))
        TORCH.add_product(d_v, weights.mT, d_o)
        d_scores = TORCH.product(d_o, v.mT, self.d_scores.shaped(scores.shape))
        d_scores.sub_(mean).mul_(weights)
        TORCH.add_product(d_k, d_scores.mT, rows)
        d_rows = TORCH.product(d_scores, k).mul_(call.scale)
        shape = b, n, tiles.r, -1, rows.shape[3]
        tiles.put(call.of_heads[0], tile, part, d_rows.view(shape), add=True)
        if self.d_f is not None:
            first = tiles.t - tile.i1 + tile.low
            sums = self._diagonals(d_scores.view(pairs.shape))
            self.d_f[part[1], :, first : first + sums.shape[2]].add_(sums)

    def _diagonals(self, d_pairs: Tensor) -> Tensor:
        """The sums (n, r, i1 − i0 + keys) over i' + j = u, of (b, n, r, i1 − i0, keys).

        Each row is written one element further right than the row before, and columns are summed.
        """
        d_pairs = d_pairs[0] if d_pairs.shape[0] == 1 else d_pairs.sum(0)
        n, r, rows, keys = d_pairs.shape
        length = rows + keys
        if self.skewed.shape != (n, r, rows, length):
            self.skewed = d_pairs.new_zeros((n, r, rows, length))
        strides = *self.skewed.stride()[:2], length + 1, 1
        self.skewed.as_strided(d_pairs.shape, strides).copy_(d_pairs)
        return self.skewed.sum(2)
