"""Softmax attention in which every process gathers all keys: PaTH, windows, gates and sinks.

Every process gets all keys and the inputs that belong to them. Each part of its queries is the end
of a call on all tokens up to its last one. So a process has all keys in memory, and the work is
balanced as in a ring. PaTH needs this because it transports keys through the reflections between
query and key. A window, a gate or a sink also depends on the whole sequence.

The gradient of a key is the sum over all processes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from precondattn.arrays import Tree
from precondattn.parallel.heads import HeadAxes
from precondattn.parallel.layouts import TokenPart
from precondattn.parallel.torch.exchange import Exchange
from precondattn.parallel.ways import DividedPiece, gathered_inputs


def output(piece: DividedPiece) -> Tensor:
    """The output of this process's tokens."""
    call = piece.call
    # Every process gets the whole arrays, as arrays of one head.
    exchange = Exchange(call.processes, HeadAxes(1, None), call.counts, 1)
    whole = {
        name: _in_order(piece, exchange.to_heads(piece.inputs[name]).split(call.counts, 1))
        for name in gathered_inputs(piece.leaf)
    }

    def attended() -> Tensor:
        parts = call.parts_of(call.rank)
        return torch.cat([_of_part(piece, part, whole) for part in parts], 1)

    return call.processes.together(attended)


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
    return piece.leaf(**inputs, **until, backend=piece.call.backend)


def _in_order(piece: DividedPiece, of_processes: Tree) -> Tensor:
    """Tokens (b, s, …) in the order of the sequence, from the tokens of every process."""
    return torch.cat([of_processes[part.device][:, part.rows] for part in piece.call.parts], 1)
