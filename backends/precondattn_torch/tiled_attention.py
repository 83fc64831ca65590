"""Softmax attention with distances or masks of pairs, in tiles, on a CPU.

Forward: PyTorch's fused kernel computes a block of queries, with the bias of their scores
(`tiles.py`) as its mask. Results for several ranges of keys are merged by their log-sum-exps λ:

    λ = log(e^{λ₁} + e^{λ₂}),    o = e^{λ₁ − λ} o₁ + e^{λ₂ − λ} o₂.

Besides inputs, outputs and gradients (`tiled_gradient.py`), only tiles are in memory. The rest of a
call, such as sinks and the read of LASER, is that of `scaled_dot_product.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from precondattn.arrays import Arrays, Residuals
from precondattn.frame import Frame
from precondattn.frameworks.torch.modes import only_computes
from precondattn.spec.metric import DOT
from precondattn.spec.softmax import SoftmaxAttention
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.distance import by_position_ahead_vjp
from precondattn_portable.layout import Part, Tile, blocks
from precondattn_portable.masks import Mask
from precondattn_torch.by_heads import ByHeads
from precondattn_torch.scaled_dot_product import Heads, Kernel, KernelAttention, of_width
from precondattn_torch.tiled_gradient import TiledGradient
from precondattn_torch.tiles import KernelTiles

QUERIES = 1024
"""The most queries that the kernel computes at once."""

FEWEST_QUERIES, BLOCKS = 128, 8
"""The least number of queries of a block, and the least number of blocks of longer calls: in causal
calls, each block computes half a block of masked keys, so blocks should be short."""

MASKED_QUERIES = 256
"""The most queries at once if masks are stored."""

STORED = 2**20
"""Entries of masks that are stored: 4 MiB in float32."""

FEWEST_KEYS = 64
"""The least number of keys that are read at once."""


class TiledKernelAttention(KernelAttention):
    """Algorithm of `Softmax`: in tiles if a call has distances or masks of pairs."""

    def __init__(self, ops: Arithmetic, leaf: SoftmaxAttention) -> None:
        super().__init__(ops, leaf)
        self.others = ByHeads(KernelAttention(ops, leaf))

    def forward(self, x: Arrays, frame: Frame) -> tuple[Tensor, Residuals]:
        if not self._fits(x, frame):
            return self.others.forward(x, frame)
        return super().forward(x, frame)

    def backward(
        self, x: Arrays, frame: Frame, out: Tensor, residuals: Residuals, cotangent: Tensor
    ) -> Arrays:
        if not self._fits(x, frame):
            return self.others.backward(x, frame, out, residuals, cotangent)
        if not math.isfinite(cotangent.sum()):
            cotangent = self._without_overflow(x, out, residuals[0], cotangent)
        return super().backward(x, frame, out, residuals, cotangent)

    def _fits(self, x: Arrays, frame: Frame) -> bool:
        leaf = self.leaf
        is_asked = leaf.distance != "none" or frame.masks_pairs
        is_other = leaf.metric != DOT or leaf.forget != "none" or leaf.bias or leaf.softcap
        if not is_asked or is_other or not x["q"].is_cpu or not only_computes():
            return False
        if any(type(array) not in (Tensor, torch.nn.Parameter) for array in x.values()):
            return False
        q, k = x["q"], x["k"]
        if q.shape[1] > k.shape[1] or not q.numel() or not has_finite_scores(leaf, q, k):
            return False
        return self._fits_values(x)

    def _kernel(self, x: Arrays, frame: Frame) -> Kernel:
        return TiledCall(self.leaf, x, frame)

    def _without_overflow(
        self, x: Arrays, out: Tensor, log_total: Tensor, cotangent: Tensor
    ) -> Tensor:
        """The cotangent, with non-finite entries set to 0 for queries without visible keys."""
        of_nothing = x["sink"] if self.leaf.sink else 0.0
        is_empty = (log_total == of_nothing) & (out == 0).all(-1)
        return cotangent.masked_fill(is_empty[..., None] & ~cotangent.isfinite(), 0.0)


def has_finite_scores(leaf: SoftmaxAttention, q: Tensor, k: Tensor) -> bool:
    """Whether all s ⟨q, k⟩ are finite: −∞ is added at masked pairs, and ∞ − ∞ is NaN."""
    d = q.shape[3]
    largest = [max(-low, high) for low, high in map(torch.aminmax, (q, k))]
    bound = largest[0] * largest[1] * d * max(leaf.scale_for(d), 1.0)
    return bool(bound.isfinite())


class PartialMeans(NamedTuple):
    """Outputs (…, e) of queries for some of the keys, and their log-sum-exps λ (…)."""

    o: Tensor
    log_total: Tensor

    def merged(self, other: PartialMeans) -> PartialMeans:
        """The outputs for the keys of both; overwrites this object's."""
        log_total = torch.logaddexp(self.log_total, other.log_total)
        base = log_total.masked_fill(log_total == -math.inf, 0.0)
        o = self.o.mul_((self.log_total - base).exp_()[..., None])
        return PartialMeans(
            o.addcmul_(other.o, (other.log_total - base).exp_()[..., None]), log_total
        )


class TiledCall:
    """A call in tiles, in the place of `WholeKernel`."""

    def __init__(self, leaf: SoftmaxAttention, x: Arrays, frame: Frame) -> None:
        self.leaf, self.x, self.tiles = leaf, x, KernelTiles(leaf, x, frame)
        self.scale = leaf.scale_for(x["q"].shape[3])

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The output (b, t, h, e), and λ (b, t, h), −∞ for a query without visible keys."""
        tiles, e = self.tiles, v.shape[3]
        width = max(q.shape[3], e)
        q, k, v = (of_width(a, width) for a in (q, k, v))
        o = q.new_zeros((*q.shape[:3], e))
        log_total = q.new_full(q.shape[:3], -math.inf)
        size = MASKED_QUERIES
        if tiles.mask.is_positional:
            size = min(max(tiles.t // BLOCKS, FEWEST_QUERIES), QUERIES)
        # The kernel has one head axis. If query heads share key heads, it is r, and n is the batch.
        for sequences in blocks(tiles.b, tiles.b if tiles.r == 1 else 1):
            part = slice(*sequences), slice(None), ...
            keys, values = (a[part[0]].transpose(1, 2) for a in (k, v))
            mask = tiles.mask.of_part(part)
            for tile in tiles.of_queries(size):
                rows = tiles.rows(q, tile, part)
                sums = reduce(PartialMeans.merged, self._sums(rows, keys, values, tile, part, mask))
                tiles.put(o, tile, part, sums.o[..., :e])
                tiles.put(log_total[..., None], tile, part, sums.log_total[..., None])
        return o, log_total

    def _sums(
        self, rows: Tensor, k: Tensor, v: Tensor, tile: Tile, part: Part, mask: Mask
    ) -> Iterator[PartialMeans]:
        """The outputs of a tile's rows (b, n, r, i1 − i0, d), for one range of keys each."""
        b, _, _, size, _ = rows.shape
        at_once = max(STORED // (b * self.tiles.masked_heads * size), FEWEST_KEYS)
        ranges = (each for near in self.tiles.parts(tile) for each in self.tiles.ranges(near))
        for start, stop, is_masked in ranges:
            for low, high in blocks(stop - start, at_once if is_masked else stop - start):
                part_tile = tile._replace(low=start + low, high=start + high)
                keys, values = (a[:, :, part_tile.low : part_tile.high] for a in (k, v))
                added = self.tiles.distances(part_tile, part)
                if not is_masked:
                    yield self._read(rows, keys, values, added)
                    continue
                visible = self.tiles.visible(part_tile, mask)
                stored = torch.where(visible, 0.0 if added is None else added, -math.inf)
                o, log_total = self._read(rows, keys, values, stored.to(rows.dtype))
                yield PartialMeans(o, log_total.masked_fill_(~visible.any(-1), -math.inf))

    def _read(self, rows: Tensor, k: Tensor, v: Tensor, added: Tensor | None) -> PartialMeans:
        """The kernel's result, with the bias `added` (b or 1, n or 1, r or 1, i1 − i0, keys)."""
        r = rows.shape[2]
        if r == 1:
            rows, added = rows[:, :, 0], None if added is None else added[:, :, 0]
        else:
            rows, added = rows[0], None if added is None else added[0]
            k, v = (a[0][:, None].expand(-1, r, -1, -1) for a in (k, v))
        o, log_total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            rows, k, v, attn_mask=added, scale=self.scale
        )
        return PartialMeans(*(a[:, :, None] if r == 1 else a[None] for a in (o, log_total)))

    def backward(
        self, heads: Heads, o: Tensor, log_total: Tensor, cotangent: Tensor
    ) -> tuple[Heads, Arrays]:
        """The gradients of q, k and v, and of the slopes or the table."""
        gradient = TiledGradient(self.tiles, self.scale, heads, o, log_total, cotangent)
        d_f = gradient.pull()
        of_distances = {} if d_f is None else by_position_ahead_vjp(self.leaf, self.x, d_f)
        return gradient.of_heads, of_distances
