"""The exchanges of processes, and the layout `heads`: tokens for heads, and back (`heads.py`).

Each of the two exchanges is the transpose of the other, so it computes the other's gradient. There
the gradient of a head that several devices received is their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup

from precondattn.algebra.declaration import Pattern
from precondattn.arrays import Shape
from precondattn.parallel.heads import HeadAxes, share
from precondattn.parallel.torch.call import WHOLE, DividedCall
from precondattn.parallel.torch.processes import MeshProcesses


def output(call: DividedCall) -> Tensor:
    """The output of this process's tokens."""
    bound, processes, inputs = call.bound, call.processes, {}
    for name, x in bound.inputs.items():
        time, axis = bound.axes[name]
        if time is not None:
            x = _exchange(call, bound.patterns[name], tuple(x.shape)).to_heads(x)
        elif axis is not None:
            part = share(x.shape[axis], processes.devices, processes.rank)
            x = x.narrow(axis, part.start, part.stop - part.start)
        inputs[name] = x
    masks = {
        name: mask if name in WHOLE else gathered(processes.group, mask, call.tokens["s"])
        for name, mask in bound.masks.items()
    }
    out = processes.together(lambda: call.mechanism(**inputs, **masks, backend=call.backend))
    pattern = call.mechanism.program.output
    return _exchange(call, pattern, pattern.shape(call.sizes)).to_tokens(out)


def _exchange(call: DividedCall, pattern: Pattern, shape: Shape) -> Exchange:
    """The exchange of an array with tokens, of this process's or of the whole shape."""
    axes = HeadAxes.of_pattern(pattern, shape)
    assert axes.time is not None  # It has tokens.
    axis, count = pattern.axes[axes.time], 1 if axes.heads is None else shape[axes.heads]
    times = tuple(axis.multiple * n for n in call.tokens[axis.letter])
    return Exchange(call.processes, axes, times, count)


class Exchange(NamedTuple):
    """The exchange of an array (b, T_r, all heads, …) for one (b, all tokens, heads of r, …)."""

    processes: MeshProcesses
    axes: HeadAxes
    times: tuple[int, ...]
    """The number of tokens on every device"""
    heads: int
    """The number of heads; 1 if every device gets the whole array"""

    def to_heads(self, x: Tensor) -> Tensor:
        """All tokens of this device's heads, from its tokens of all heads."""
        return _Exchanged.apply(self, True, x)

    def to_tokens(self, x: Tensor) -> Tensor:
        """This device's tokens of all heads, from all tokens of its heads."""
        return _Exchanged.apply(self, False, x)

    def run(self, x: Tensor, *, to_heads: bool) -> Tensor:
        cut, devices = self._heads_of if to_heads else self._tokens_of, range(len(self.times))
        sent = [cut(x, device) for device in devices]
        shapes = [self._shape(x, source, to_heads=to_heads) for source in devices]
        pieces = exchanged(self.processes.group, self.processes.rank, sent, shapes)
        return torch.cat(pieces, self.axes.time) if to_heads else self._joined_heads(pieces)

    def _heads_of(self, x: Tensor, device: int) -> Tensor:
        axis = self.axes.heads
        if axis is None:
            return x
        part = share(self.heads, len(self.times), device)
        return x.narrow(axis, part.start, part.stop - part.start)

    def _tokens_of(self, x: Tensor, device: int) -> Tensor:
        return x.narrow(self.axes.time, sum(self.times[:device]), self.times[device])

    def _joined_heads(self, pieces: list[Tensor]) -> Tensor:
        axis, count, devices = self.axes.heads, self.heads, len(self.times)
        if axis is None:
            return _sum(pieces)
        if count >= devices:
            return torch.cat(pieces, axis)
        firsts = [head * devices // count for head in range(count + 1)]
        return torch.cat([_sum(pieces[a:b]) for a, b in pairwise(firsts)], axis)

    def _shape(self, x: Tensor, source: int, *, to_heads: bool) -> Shape:
        """The shape of the piece that a device sends to this one."""
        shape, rank = list(x.shape), self.processes.rank
        assert self.axes.time is not None  # Arrays without tokens are not exchanged.
        shape[self.axes.time] = self.times[source if to_heads else rank]
        if self.axes.heads is not None:
            of = share(self.heads, len(self.times), rank if to_heads else source)
            shape[self.axes.heads] = len(range(self.heads)[of])
        return tuple(shape)


def _sum(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.stack(pieces).sum(0)


class _Exchanged(torch.autograd.Function):  # type: ignore[misc]
    """`Exchange.run`, with the reverse exchange as its gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, exchange: Exchange, to_heads: bool, x: Tensor) -> Tensor:
        ctx.exchange, ctx.to_heads = exchange, to_heads
        return exchange.run(x, to_heads=to_heads)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: FunctionCtx, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, ctx.exchange.run(cotangent, to_heads=not ctx.to_heads)


def exchanged(
    group: ProcessGroup, rank: int, sent: Sequence[Tensor], shapes: Sequence[Shape]
) -> list[Tensor]:
    """The pieces that every device sends to this one, as bytes; `sent` has one for each device."""
    like = sent[rank]
    sizes = [0 if device == rank else prod(shape) for device, shape in enumerate(shapes)]
    others = [piece for device, piece in enumerate(sent) if device != rank]
    buffer = torch.cat([like.new_empty(0), *(piece.reshape(-1) for piece in others)])
    result = like.new_empty(sum(sizes))
    dist.all_to_all_single(
        result.view(torch.uint8),
        buffer.view(torch.uint8),
        [size * like.dtype.itemsize for size in sizes],
        [0 if i == rank else x.numel() * like.dtype.itemsize for i, x in enumerate(sent)],
        group=group,
    )
    return [
        like if device == rank else piece.view(shapes[device])
        for device, piece in enumerate(result.split(sizes))
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
            operations += [
                dist.P2POp(function, x, group=group, tag=i, group_peer=rank)
                for i, x in enumerate(tensors or ())
            ]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return received


def gathered(group: ProcessGroup, mask: Tensor, tokens: Sequence[int]) -> Tensor:
    """The mask of all tokens (b, s), gathered from every device's part."""
    shapes = [(mask.shape[0], n) for n in tokens]
    return torch.cat(exchanged(group, dist.get_rank(group), [mask] * len(tokens), shapes), 1)
