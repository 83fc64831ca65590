"""The tiles of a call of softmax attention, with the biases of their distances and their masks.

The bias of distances in a tile is a Toeplitz matrix, which is not stored. With the tile's queries
in reverse order, i' = i1 − 1 − i, it is a Hankel matrix B_i'j = f_{i' + j}: a view of f
(`precondattn_portable/distance.py`), whose rows overlap in memory. If causality and a window are
the only masks, they are entries of −∞ in f. Other masks are stored, for one tile at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from precondattn.arrays import Arrays
from precondattn.frame import Frame, has_lengths_only
from precondattn.spec.softmax import SoftmaxAttention
from precondattn_portable.distance import by_position_ahead, positions_ahead
from precondattn_portable.layout import Part, Tile, grouped_bias
from precondattn_portable.masks import Mask
from precondattn_torch.arithmetic import TORCH

FEWEST_BETWEEN = 64
"""The narrowest gap between a prefix and a window for which a tile is split in two."""


class KernelTiles:
    """The tiles of a call of t queries, h heads of which r share one of n key heads."""

    def __init__(self, leaf: SoftmaxAttention, x: Arrays, frame: Frame) -> None:
        (self.b, self.t, self.h, _), (self.s, self.n) = x["q"].shape, x["k"].shape[1:3]
        self.r, self.like = self.h // self.n, x["q"]
        # Outputs and cotangents of padded queries are set to 0.
        needless = leaf.causal and has_lengths_only(frame)
        frame = frame.replaced(q_valid=None, **({"k_valid": None} if needless else {}))
        pairs = None if frame.pairs is None else grouped_bias(frame.pairs, self.n)
        frame, offset = frame.replaced(pairs=None), self.s - self.t
        self.mask = Mask(frame, self.s, offset, leaf.causal, leaf.window, pairs=pairs)
        self.f = None if leaf.distance == "none" else self._by_position_ahead(leaf, x)
        """The bias of distances (n, r, t + s)"""
        self.masked_heads = 1 if pairs is None else pairs.shape[1] * pairs.shape[2]
        """The number of heads in a tile's stored masks"""
        if self.f is not None:
            self.masked_heads = self.h

    def _by_position_ahead(self, leaf: SoftmaxAttention, x: Arrays) -> Tensor:
        f = by_position_ahead(leaf, x).to(x["q"].dtype)
        if self.mask.is_positional:
            ahead = positions_ahead(self.t, self.s, x["q"])
            if leaf.causal:
                f = f.masked_fill(ahead > 0, -math.inf)
            if leaf.window is not None:
                f = f.masked_fill(ahead.abs() >= leaf.window, -math.inf)
        return f.contiguous()

    def of_queries(self, size: int) -> Iterator[Tile]:
        """Blocks of queries with all keys that any of them may attend to, if there are any."""
        return (tile for tile in self.mask.tiles(self.t, size) if tile.low < tile.high)

    def parts(self, tile: Tile) -> list[Tile]:
        """The tile, or its parts before and after the keys between a prefix and a window."""
        start, stop = self.mask.between(tile.i0, tile.i1)
        if stop - start < FEWEST_BETWEEN:
            return [tile]
        ranges = self.mask.ranges(tile.i0, tile.i1)
        return [tile._replace(low=low, high=high) for low, high in ranges]

    def ranges(self, tile: Tile) -> Iterator[tuple[int, int, bool]]:
        """(start, stop, whether single pairs are masked) of all keys of a tile."""
        masked = self.mask.partly_masked(tile)
        if self.f is not None and self.mask.is_positional:
            masked = []
        position = tile.low
        for start, stop in [*masked, (tile.high, tile.high)]:
            if position < start:
                yield position, start, False
            if start < stop:
                yield start, stop, True
            position = stop

    def distances(self, tile: Tile, part: Part) -> Tensor | None:
        """The bias of a tile's distances (1, n, r, i1 − i0, high − low), a view of f."""
        if self.f is None:
            return None
        f = self.f[part[1]]
        sizes = (1, *f.shape[:2], tile.i1 - tile.i0, tile.high - tile.low)
        first = f.storage_offset() + self.t - tile.i1 + tile.low
        return f.as_strided(sizes, (0, *f.stride()[:2], 1, 1), first)

    def visible(self, tile: Tile, mask: Mask) -> Tensor:
        """The visible pairs of a tile, by a mask of some heads (b or 1, n or 1, r or 1, …)."""
        return self._in_order(mask.visible(TORCH, self.like, tile))

    def rows(self, x: Tensor, tile: Tile, part: Part) -> Tensor:
        """The rows (b, n, r, i1 − i0, d) of some heads' queries of x (b, t, h, d)."""
        return self._in_order(self._at(x, tile, part).movedim(1, 3))

    def put(self, x: Tensor, tile: Tile, part: Part, rows: Tensor, *, add: bool = False) -> None:
        """Write rows to x (b, t, h, d), or add them."""
        rows, there = self._in_order(rows).movedim(3, 1), self._at(x, tile, part)
        if add:
            there.add_(rows)
        else:
            there.copy_(rows)

    def _at(self, x: Tensor, tile: Tile, part: Part) -> Tensor:
        return x.unflatten(2, (self.n, self.r))[part[0], tile.i0 : tile.i1, part[1]]

    def _in_order(self, rows: Tensor) -> Tensor:
        """Queries (…, i1 − i0, d), in reverse order if there are distances."""
        return rows if self.f is None else torch.flip(rows, (-2,))
