"""Softmax attention in which every process gathers all keys: PaTH, windows, gates and sinks.

Every process gets all keys and the inputs that belong to them. Each part of its queries is the end
of a call on all tokens up to its last one. So a process has all keys in memory, and the work is
balanced as in a ring. PaTH needs this because it transports keys through the reflections between
query and key. A window, a gate or a sink also depends on the whole sequence.

The gradient of a key is the sum over all processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from precondattn.parallel.layouts import TokenPart
from precondattn.parallel.torch.exchange import exchanged
from precondattn.parallel.torch.piece import DividedPiece
from precondattn.parallel.ways import gathered_inputs

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

    from precondattn.arrays import Tree


def output(piece: DividedPiece) -> Tensor:
    """The output of this process's tokens."""
    names = gathered_inputs(piece.leaf)
    arrays = _GatheredTokens.apply(piece, *(piece.inputs[name] for name in names))
    whole = dict(zip(names, arrays, strict=True))

    def attended() -> Tensor:
        parts = piece.own_parts(piece.processes.rank)
        return torch.cat([_of_part(piece, part, whole) for part in parts], 1)

    out: Tensor = piece.processes.together(attended)
    return out


def _of_part(piece: DividedPiece, part: TokenPart, whole: dict[str, Tensor]) -> Tensor:
    """The output of consecutive queries: the last ones of a call on all tokens up to them."""
    end = part.first + part.tokens
    inputs = {}
    for name, x in piece.inputs.items():
        if name in whole:
            inputs[name] = whole[name][:, :end]
        else:
            has_tokens = "t" in piece.leaf.inputs[name].letters
            inputs[name] = x[:, part.rows] if has_tokens else x
    masks = {"key_mask": piece.masks.valid, "segment_ids": piece.masks.segment}
    until = {n: _in_order(piece, of)[:, :end] for n, of in masks.items() if of is not None}
    out: Tensor = piece.leaf(**inputs, **until, backend=piece.backend)
    return out


def _in_order(piece: DividedPiece, of_processes: Tree) -> Tensor:
    """Tokens (b, s, …) in the order of the sequence, from the tokens of every process."""
    return torch.cat([of_processes[part.device][:, part.rows] for part in piece.parts], 1)


class _GatheredTokens(torch.autograd.Function):  # type: ignore[misc]
    """All tokens of some arrays in the order of the sequence; the gradient sums over processes."""

    @staticmethod
    def forward(ctx: FunctionCtx, piece: DividedPiece, *arrays: Tensor) -> Tensor:
        ctx.piece = piece
        processes = piece.processes
        group, rank, devices = processes.group, processes.rank, processes.devices
        shapes = [[(x.shape[0], n, *x.shape[2:]) for x in arrays] for n in piece.counts]
        received = exchanged(group, rank, [[x.contiguous() for x in arrays]] * devices, shapes)
        return tuple(_in_order(piece, of_one) for of_one in zip(*received, strict=True))

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: FunctionCtx, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        piece: DividedPiece = ctx.piece
        processes = piece.processes
        group, rank, devices = processes.group, processes.rank, processes.devices
        sent = [[_of_process(piece, process, d) for d in cotangents] for process in range(devices)]
        received = exchanged(group, rank, sent, [[x.shape for x in sent[rank]]] * devices)
        return None, *(torch.stack(of_one).sum(0) for of_one in zip(*received, strict=True))


def _of_process(piece: DividedPiece, process: int, whole: Tensor) -> Tensor:
    """A process's tokens in its order, taken from all tokens."""
    parts = [whole[:, part.first : part.first + part.tokens] for part in piece.own_parts(process)]
    return torch.cat(parts, 1)
