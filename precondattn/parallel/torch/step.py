"""One leaf call on new tokens that all processes have, after cached tokens that are divided.

A leaf that reads cached tokens computes a part from this process's tokens. The size of this tensor
does not depend on the number of tokens. One all-gather gives every process all parts, and each
merges them in the same order. So all have the same output, bit by bit.

A message has one more number, which is 1 if its process has an error. Then all processes raise it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from precondattn.arrays import Arrays
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


def of_all_processes(
    processes: MeshProcesses, step: DividedStep, way: ModuleType, error: Exception | None
) -> Tensor:
    """The parts (P, …) of all processes, each from `way.part(step)`, in float32 or wider.

    If a process has an error, of an earlier leaf or of its part, all raise it.
    """
    is_double = any(x.dtype == torch.float64 for x in step.new.inputs.values())
    dtype = torch.float64 if is_double else torch.float32
    shape, device, part = way.part_shape(step), processes.device, None
    if error is None:
        part, error = tried(partial(way.part, step))
    if part is None:
        part = torch.zeros(shape, dtype=dtype, device=device)
    flag = torch.full((1,), float(error is not None), dtype=dtype, device=device)
    message = torch.cat([part.reshape(-1).to(dtype), flag])
    everyone = [torch.empty_like(message) for _ in range(processes.devices)]
    dist.all_gather(everyone, message, group=processes.group)
    rows = torch.stack(everyone)
    if bool(rows[:, -1].any()):
        processes.agree(error)
    return rows[:, :-1].view(processes.devices, *shape)
