"""One leaf call of a divided call: this process's inputs, and the masks of all processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from precondattn.algebra.declaration import Inputs, Pattern
from precondattn.execution.masks import ValueChecks, is_contiguous, packed_by, zero_padding
from precondattn.parallel.layouts import TokenPart
from precondattn.parallel.torch.call import DividedCall, MeshProcesses
from precondattn.parallel.torch.exchange import gathered

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Leaf
    from precondattn.algebra.piece import BackendNames


@dataclass(frozen=True)
class DividedMasks:
    """Validity and segments of the tokens (b, tokens of a process) of every process.

    Every process has the masks of all processes: they are small beside keys and values.
    """

    within: tuple[Tensor, ...] | None
    """Whether a token is within `lengths`, and so a valid query"""
    valid: tuple[Tensor, ...] | None
    """Whether a token is within `lengths` and not masked by `key_mask`, and so a valid key"""
    segment: tuple[Tensor, ...] | None

    def without_padding(
        self, process: int, arrays: Mapping[str, Tensor], patterns: Mapping[str, Pattern]
    ) -> dict[str, Tensor]:
        """A process's arrays with 0 at padding, so that NaN there does not spread."""
        if self.valid is None:
            return dict(arrays)
        within = None if self.within is None else self.within[process]
        return zero_padding(arrays, cast(Inputs, patterns), within, self.valid[process])

    def valid_of(self, process: int) -> Tensor | None:
        return None if self.valid is None else self.valid[process]

    def of_extension(self, process: int) -> dict[str, Tensor]:
        """The masks of a process's tokens, as arguments of an extension of states.

        A process's tokens are consecutive, so that the ones within `lengths` come first.
        """
        masks = {}
        if self.within is not None:
            masks["lengths"] = self.within[process].sum(1)
        if self.valid is not None and self.valid is not self.within:
            masks["key_mask"] = self.valid[process]
        if self.segment is not None:
            masks["segment_ids"] = self.segment[process]
        return masks

    def segment_of(self, process: int) -> Tensor | None:
        return None if self.segment is None else self.segment[process]

    def of_rows(self, process: int, rows: slice) -> dict[str, Tensor]:
        """The masks of some rows of a process, as arguments of a full call on these tokens."""
        masks = {}
        if self.valid is not None:
            masks["key_mask"] = self.valid[process][:, rows]
        if self.segment is not None:
            masks["segment_ids"] = self.segment[process][:, rows]
        return masks


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

    def own_parts(self, process: int) -> list[TokenPart]:
        """The parts of one process, in the order of the sequence."""
        return [part for part in self.parts if part.device == process]

    def count(self, process: int) -> int:
        """The number of tokens of a process."""
        return sum(part.tokens for part in self.own_parts(process))


def masks_of(
    call: DividedCall, processes: MeshProcesses, *, is_planned: bool = False
) -> DividedMasks:
    """The masks of all processes' tokens, after an exchange of masks with an entry per token.

    For a plan nothing is exchanged, and all masks are None.

    Raises
    ------
    ValueError
        for `lengths` or `cu_seqlens` that do not fit the tokens.
    """
    given, counts, b = call.bound.masks, call.tokens["s"], call.sizes["b"]
    if not given or is_planned:
        return DividedMasks(None, None, None)
    assert call.order is not None  # Only `heads` has none.
    total, device = sum(counts), processes.device
    parts = call.order.parts(counts)
    of_process = [positions_of(parts, process, device) for process in range(processes.devices)]
    within, valid, segment, packed = None, None, None, None
    if "cu_seqlens" in given:
        like = next(iter(call.bound.inputs.values()))
        checks = ValueChecks(processes.owner)
        packed = packed_by(processes.owner, given["cu_seqlens"], like, b, total, checks)
        segment = tuple(packed.segment_ids[:, positions] for positions in of_process)
    if "key_mask" in given:
        valid = gathered(processes.group, given["key_mask"], counts).split(counts, 1)
    lengths = None if packed is None else packed.lengths
    if "lengths" in given:
        own = torch.as_tensor(given["lengths"], device=device)
        check_lengths(processes.owner, own, b, total)
        lengths = own if lengths is None else torch.minimum(own, lengths)
    if lengths is not None:
        within = tuple(positions[None] < lengths[:, None] for positions in of_process)
        valid = within if valid is None else tuple(map(torch.logical_and, valid, within))
    if "segment_ids" in given:
        whole = gathered(processes.group, given["segment_ids"], counts)
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


def crossing(segment: Tensor | None, at: int, other: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Which tokens of two runs, one before the other, are of the one segment that both may have.

    Segments are contiguous. So it is the first segment of the first argument if the other tokens
    come before it (`at` is 0), and its last segment if they come after it (`at` is −1). None
    without segments.
    """
    if segment is None or other is None:
        return None
    facing = segment[:, at : at + 1 or None]
    return segment == facing, other == facing
