"""One leaf call of a divided call: this process's inputs, and the masks of all processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from precondattn.execution.masks import ValueChecks, is_contiguous, packed_by
from precondattn.parallel.layouts import TokenPart
from precondattn.parallel.masks import DividedMasks
from precondattn.parallel.torch.call import DividedCall, MeshProcesses
from precondattn.parallel.torch.exchange import gathered

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Leaf
    from precondattn.algebra.piece import BackendNames


class DividedPiece(NamedTuple):
    """A leaf call whose tokens are divided."""

    leaf: Leaf
    inputs: dict[str, Tensor]
    """Tensors by the leaf's input names"""
    parts: tuple[TokenPart, ...]
    """All parts of the sequence, in the order of the sequence"""
    masks: DividedMasks
    processes: MeshProcesses
    backend: BackendNames
    broadcasts: int = 1

    def own_parts(self, process: int) -> list[TokenPart]:
        """The parts of one process, in the order of the sequence."""
        return [part for part in self.parts if part.device == process]

    def count(self, process: int) -> int:
        """The number of tokens of a process."""
        return sum(part.tokens for part in self.own_parts(process))

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of tokens of each process."""
        return tuple(map(self.count, range(self.processes.devices)))

    @property
    def place(self) -> int:
        return self.processes.rank

    def states(self) -> dict[str, Tensor]:
        """The leaf's empty states."""
        return self.leaf.init_cache(**self.inputs).store


def masks_of(call: DividedCall) -> DividedMasks:
    """The masks of all processes' tokens, after an exchange of masks with an entry per token."""
    masks, counts, b = call.bound.masks, call.tokens["s"], call.sizes["b"]
    if not masks:
        return DividedMasks()
    processes, total, parts = call.processes, sum(counts), call.parts
    device, ranks = processes.device, range(processes.devices)
    of_process = [positions_of(parts, rank, device) for rank in ranks]
    within, valid, segment, packed = None, None, None, None
    if "cu_seqlens" in masks:
        like = next(iter(call.bound.inputs.values()))
        checks = ValueChecks(processes.owner)
        packed = packed_by(processes.owner, masks["cu_seqlens"], like, b, total, checks)
        segment = tuple(packed.segment_ids[:, positions] for positions in of_process)
    if "key_mask" in masks:
        valid = gathered(processes.group, masks["key_mask"], counts).split(counts, 1)
    lengths = None if packed is None else packed.lengths
    if "lengths" in masks:
        of_sequences = torch.as_tensor(masks["lengths"], device=device)
        check_lengths(processes.owner, of_sequences, b, total)
        lengths = of_sequences if lengths is None else torch.minimum(of_sequences, lengths)
    if lengths is not None:
        within = tuple(positions[None] < lengths[:, None] for positions in of_process)
        valid = within if valid is None else tuple(map(torch.logical_and, valid, within))
    if "segment_ids" in masks:
        whole = gathered(processes.group, masks["segment_ids"], counts)
        segment = whole.split(counts, 1)
        in_order = torch.empty_like(whole)
        in_order[:, torch.cat(of_process)] = whole
        if not bool(is_contiguous(in_order).all()):
            raise ValueError(f"{processes.owner}: segment_ids must be contiguous")
    return DividedMasks(within, valid, segment)


def positions_of(parts: Sequence[TokenPart], process: int, device: torch.device) -> Tensor:
    """The positions in the sequence of a process's tokens."""
    spans = [(part.first, part.first + part.tokens) for part in parts if part.device == process]
    return torch.cat([torch.arange(*span, device=device) for span in spans])


def check_lengths(owner: str, lengths: Tensor, b: int, s: int) -> None:
    if tuple(lengths.shape) != (b,):
        raise ValueError(f"{owner}: lengths must have shape ({b},); found {tuple(lengths.shape)}")
    if bool(((lengths < 0) | (lengths > s)).any()):
        raise ValueError(f"{owner}: lengths must be in 0 ... {s}; found {lengths.tolist()}")


def crossing(
    segments: tuple[Tensor, ...] | None,
    of_run: tuple[int, slice],
    at: int,
    other: tuple[int, slice],
) -> tuple[Tensor | None, Tensor | None]:
    """Which tokens of two runs, one before the other, are of the one segment that both may have.

    A run is a process and its rows. Segments are contiguous. So it is the first segment of the
    first run if the other one comes before it (`at` is 0), and its last segment if it comes after
    it (`at` is −1). None without segments.
    """
    if segments is None:
        return None, None
    run, others = (segments[process][:, rows] for process, rows in (of_run, other))
    facing = run[:, at : at + 1 or None]
    return run == facing, others == facing
