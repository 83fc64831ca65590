"""The exchange of tokens for heads and back between processes, differentiable.

Each of the two exchanges is the transpose of the other, so it computes the other's gradient. There
the gradient of a head that several devices received is their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from precondattn.arrays import Shape
from precondattn.parallel.heads import HeadAxes, first_with, share

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx
    from torch.distributed import ProcessGroup

    from precondattn.parallel.torch.call import MeshProcesses

Pieces = list[list[Tensor]]
"""For each device, a piece of each array."""


class Exchange(NamedTuple):
    """The exchange between arrays (b, T_r, all heads, …) and (b, all tokens, heads of r, …)."""

    processes: MeshProcesses
    axes: tuple[HeadAxes, ...]
    times: tuple[tuple[int, ...], ...]
    """The number of tokens of each array on every device."""
    heads: tuple[int, ...]
    """The number of heads of each array; 1 if every device gets the whole array."""

    @property
    def devices(self) -> int:
        return len(self.times[0])

    def to_heads(self, arrays: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """All tokens of this device's heads, from its tokens of all heads."""
        moved: tuple[Tensor, ...] = _Exchanged.apply(self, True, *arrays)
        return moved

    def to_tokens(self, arrays: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """This device's tokens of all heads, from all tokens of its heads."""
        moved: tuple[Tensor, ...] = _Exchanged.apply(self, False, *arrays)
        return moved

    def run(self, arrays: Sequence[Tensor], *, to_heads: bool) -> tuple[Tensor, ...]:
        devices = range(self.devices)
        cut, join = self._heads_of, self._joined_tokens
        if not to_heads:
            cut, join = self._tokens_of, self._joined_heads
        sent = [[cut(i, x, device) for i, x in enumerate(arrays)] for device in devices]
        shapes = [
            [self._shape(i, x, source, to_heads=to_heads) for i, x in enumerate(arrays)]
            for source in devices
        ]
        received = exchanged(self.processes.group, self.processes.rank, sent, shapes)
        return tuple(join(i, [of[i] for of in received]) for i in range(len(arrays)))

    def _heads_of(self, i: int, x: Tensor, device: int) -> Tensor:
        """A device's heads of array i."""
        axis = self.axes[i].heads
        if axis is None:
            return x
        part = share(self.heads[i], self.devices, device)
        return x.narrow(axis, part.start, part.stop - part.start)

    def _tokens_of(self, i: int, x: Tensor, device: int) -> Tensor:
        """A device's tokens of array i."""
        times = self.times[i]
        return x.narrow(self.axes[i].time, sum(times[:device]), times[device])

    def _joined_heads(self, i: int, pieces: list[Tensor]) -> Tensor:
        axis, count = self.axes[i].heads, self.heads[i]
        if axis is None:
            return _sum(pieces)
        if count >= self.devices:
            return torch.cat(pieces, axis)
        firsts = [first_with(count, self.devices, head) for head in range(count + 1)]
        return torch.cat([_sum(pieces[a:b]) for a, b in pairwise(firsts)], axis)

    def _joined_tokens(self, i: int, pieces: list[Tensor]) -> Tensor:
        return torch.cat(pieces, self.axes[i].time)

    def _shape(self, i: int, x: Tensor, source: int, *, to_heads: bool) -> Shape:
        """The shape of the piece that a device sends to this one."""
        shape, axes = list(x.shape), self.axes[i]
        assert axes.time is not None  # Arrays without tokens are not exchanged.
        shape[axes.time] = self.times[i][source if to_heads else self.processes.rank]
        if axes.heads is not None:
            of = self.processes.rank if to_heads else source
            shape[axes.heads] = len(range(self.heads[i])[share(self.heads[i], self.devices, of)])
        return tuple(shape)


def _sum(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.stack(pieces).sum(0)


class _Exchanged(torch.autograd.Function):  # type: ignore[misc]
    """`Exchange.run`, with the reverse exchange as its gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, exchange: Exchange, to_heads: bool, *arrays: Tensor) -> Tensor:
        ctx.exchange, ctx.to_heads = exchange, to_heads
        return exchange.run(arrays, to_heads=to_heads)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: FunctionCtx, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.exchange.run(cotangents, to_heads=not ctx.to_heads))


def exchanged(
    group: ProcessGroup, rank: int, sent: Pieces, shapes: Sequence[Sequence[Shape]]
) -> Pieces:
    """The pieces that every device sends to this one; `sent` has the pieces for each device.

    There is one message for each dtype, sent as bytes.
    """
    received: Pieces = [[torch.empty(0, device="cpu")] * len(sent[0]) for _ in sent]
    received[rank] = sent[rank]
    others = [device for device in range(len(sent)) if device != rank]
    for dtype in dict.fromkeys(piece.dtype for piece in sent[rank]):
        chosen = [i for i, piece in enumerate(sent[rank]) if piece.dtype == dtype]
        sizes_sent = _sizes([[tuple(x.shape) for x in of] for of in sent], chosen, rank)
        sizes_received = _sizes(shapes, chosen, rank)
        like = sent[rank][chosen[0]]
        parts = [sent[device][i].reshape(-1) for device in others for i in chosen]
        buffer = torch.cat([like.new_empty(0), *parts])
        result = like.new_empty(sum(sizes_received))
        dist.all_to_all_single(
            result.view(torch.uint8),
            buffer.view(torch.uint8),
            [size * dtype.itemsize for size in sizes_received],
            [size * dtype.itemsize for size in sizes_sent],
            group=group,
        )
        at = 0
        for device in others:
            for i in chosen:
                size = prod(shapes[device][i])
                received[device][i] = result[at : at + size].view(shapes[device][i])
                at += size
    return received


def _sizes(shapes: Sequence[Sequence[Shape]], chosen: list[int], rank: int) -> list[int]:
    """The number of elements in the chosen pieces of every device; 0 for this one."""
    return [
        0 if device == rank else sum(prod(of[i]) for i in chosen)
        for device, of in enumerate(shapes)
    ]


def passed(
    group: ProcessGroup,
    arrays: Sequence[Tensor],
    to: int | None,
    source: int | None,
    shapes: Sequence[Shape] | None = None,
) -> list[Tensor] | None:
    """The arrays that process `source` sends to this one, while it sends its own to process `to`.

    `shapes` are those of the received arrays, by default those of its own. None without a source.
    """
    shapes = [x.shape for x in arrays] if shapes is None else shapes
    received, operations = None, []
    if source is not None:
        received = [x.new_empty(shape) for x, shape in zip(arrays, shapes, strict=True)]
    for function, tensors, rank in ((dist.isend, arrays, to), (dist.irecv, received, source)):
        if rank is not None:
            peer = dist.get_global_rank(group, rank)
            operations += [
                dist.P2POp(function, x, peer, group, tag=i) for i, x in enumerate(tensors or ())
            ]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return received


def gathered(group: ProcessGroup, mask: Tensor, tokens: Sequence[int]) -> Tensor:
    """The mask of all tokens (b, s), gathered from every device's part."""
    shapes = [[(mask.shape[0], n)] for n in tokens]
    pieces = exchanged(group, dist.get_rank(group), [[mask] for _ in tokens], shapes)
    return torch.cat([of[0] for of in pieces], 1)
