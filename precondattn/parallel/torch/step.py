"""One leaf call on new tokens that all processes have, after cached tokens that are divided.

A leaf that reads cached tokens computes a part from this process's tokens. The size of this tensor
does not depend on the number of tokens. One all-gather gives every process all parts, and each
merges them in the same order. So all have the same output, bit by bit.

A message has one more number, which is 1 if its process has an error. Then all processes raise it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from precondattn.arrays import Arrays, Shape
from precondattn.parallel.torch.processes import MeshProcesses, tried
from precondattn.parallel.ways import LeafOfWay

if TYPE_CHECKING:
    from precondattn.parallel.torch.cache_arguments import NewTokens


class DividedStep(NamedTuple):
    """A leaf call on new tokens."""

    leaf: LeafOfWay
    inputs: Mapping[str, Tensor]
    """The new tokens by the leaf's input names, the same on all processes"""
    past: Mapping[str, Tensor]
    """This process's rows (b, rows, …) by slot name, without unused ones; and states"""
    rows: int
    seen: Tensor | None
    """Which of the rows (b, rows) have an unmasked token; None if all have"""
    new: NewTokens
    """The arguments of the call, with the masks of the new tokens"""

    def of_past(self) -> Arrays:
        """The options of a call whose keys are this process's cached rows."""
        masks = {} if self.seen is None else {"key_mask": self.seen}
        return {"backend": self.new.backend, **masks}

    def of_new(self) -> Arrays:
        """The options of a call whose keys are the new tokens."""
        masks = {} if self.new.valid is None else {"key_mask": self.new.valid}
        return {"backend": self.new.backend, **masks}


@dataclass(frozen=True)
class PartExchanges:
    """The exchanges of parts in one call."""

    processes: MeshProcesses
    dtype: torch.dtype
    """float32 or wider"""

    def of_all(
        self, shape: Shape, compute: Callable[[], Tensor], error: Exception | None
    ) -> Tensor:
        """The parts of all processes (P, *shape); `compute` gives this process's part.

        If a process has an error, of an earlier leaf or of `compute`, all raise it.
        """
        part = None
        if error is None:
            part, error = tried(compute)
        devices, device = self.processes.devices, self.processes.device
        flag = torch.full((1,), float(error is not None), dtype=self.dtype, device=device)
        if part is None:
            part = torch.zeros(shape, dtype=self.dtype, device=device)
        message = torch.cat([part.reshape(-1).to(self.dtype), flag])
        everyone = message.repeat(devices)
        if devices > 1:
            dist.all_gather_into_tensor(everyone, message, group=self.processes.group)
        rows = everyone.view(devices, -1)
        if bool(rows[:, -1].any()):
            self.processes.agree(error)
        return rows[:, :-1].view(devices, *shape)

    def bytes_sent(self, shape: Shape) -> int:
        """The bytes that this process sends in one exchange."""
        sent: int = (self.processes.devices - 1) * (prod(shape) + 1) * self.dtype.itemsize
        return sent
