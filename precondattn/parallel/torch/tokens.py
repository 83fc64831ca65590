"""The layouts that divide tokens: a process keeps its tokens, and each leaf is divided separately.

`precondattn/parallel/ways.py` lists the ways to divide a leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from precondattn.execution.masks import ValueChecks, check_lengths, is_contiguous, packed_by
from precondattn.parallel import ways
from precondattn.parallel.layouts import TokenPart
from precondattn.parallel.masks import DividedMasks
from precondattn.parallel.torch import exchange, gathered, ring, solve, states
from precondattn.parallel.torch.call import DividedCall
from precondattn.parallel.ways import DividedPiece, Way


def alone(piece: DividedPiece) -> Tensor:
    """The output of this process's tokens, each of which is computed alone."""
    call = piece.call
    return call.processes.together(lambda: piece.leaf(**piece.inputs, backend=call.backend))


OUTPUTS: Mapping[Way, Callable[[DividedPiece], Tensor]] = {
    ways.LOCAL: alone,
    ways.RING: ring.output,
    ways.GATHERED: gathered.output,
    ways.SOLVE: solve.output,
    ways.STATES: states.output,
}


def output(call: DividedCall) -> Tensor:
    """The output of this process's tokens."""
    inputs, together = call.bound.inputs, call.processes.together
    masks = together(lambda: masks_of(call))
    return ways.computed(
        call, inputs, masks, lambda number, way, piece: OUTPUTS[way](piece), together
    )


def masks_of(call: DividedCall) -> DividedMasks:
    """The masks of all processes' tokens, after an exchange of masks with an entry per token."""
    masks, counts, b = call.bound.masks, call.tokens["s"], call.sizes["b"]
    if not masks:
        return DividedMasks()
    processes, total, owner = call.processes, sum(counts), call.processes.owner
    like, checks = next(iter(call.bound.inputs.values())), ValueChecks(owner)
    of_process = [positions_of(call.parts, i, processes.device) for i in range(call.devices)]
    within = valid = segment = lengths = None
    if "cu_seqlens" in masks:
        packed = packed_by(owner, masks["cu_seqlens"], like, b, total, checks)
        segment = tuple(packed.segment_ids[:, positions] for positions in of_process)
        lengths = packed.lengths
    if "key_mask" in masks:
        valid = exchange.gathered(processes.group, masks["key_mask"], counts).split(counts, 1)
    if "lengths" in masks:
        of_sequences = torch.as_tensor(masks["lengths"], device=processes.device)
        check_lengths(owner, of_sequences, like, b, total, "s", checks)
        lengths = of_sequences if lengths is None else torch.minimum(of_sequences, lengths)
    if lengths is not None:
        within = tuple(positions[None] < lengths[:, None] for positions in of_process)
        valid = within if valid is None else tuple(map(torch.logical_and, valid, within))
    if "segment_ids" in masks:
        whole = exchange.gathered(processes.group, masks["segment_ids"], counts)
        segment = whole.split(counts, 1)
        in_order = torch.empty_like(whole)
        in_order[:, torch.cat(of_process)] = whole
        if not bool(is_contiguous(in_order).all()):
            raise ValueError(f"{owner}: segment_ids must be contiguous")
    return DividedMasks(within, valid, segment)


def positions_of(parts: Sequence[TokenPart], process: int, device: torch.device) -> Tensor:
    """The positions in the sequence of a process's tokens."""
    spans = [(part.first, part.first + part.tokens) for part in parts if part.device == process]
    return torch.cat([torch.arange(*span, device=device) for span in spans])
