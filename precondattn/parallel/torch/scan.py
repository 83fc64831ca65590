"""A prefix scan of states along the processes of PyTorch, in log₂ P rounds (`states.py`).

In round i a process sends T and F of the last 2^i processes up to itself to the process that is 2^i
places later: Hillis and Steele 1986, Data parallel algorithms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from precondattn.parallel.states import SegmentBorders, StateMap


class ProcessLine(NamedTuple):
    """The processes of a group, in their order or in reverse."""

    group: ProcessGroup
    rank: int
    devices: int
    is_reversed: bool = False

    @property
    def place(self) -> int:
        return self.devices - 1 - self.rank if self.is_reversed else self.rank

    def rank_at(self, place: int) -> int:
        """The global rank of the process at this place of the line."""
        rank = self.devices - 1 - place if self.is_reversed else place
        return int(dist.get_global_rank(self.group, rank))

    def passed(self, tensors: list[Tensor], distance: int) -> list[Tensor] | None:
        """The tensors of the process `distance` places before this one; None if there is none.

        Every process sends its `tensors` at the same time.
        """
        to, source = self.place + distance, self.place - distance
        received = [torch.empty_like(x) for x in tensors] if source >= 0 else None
        operations = []
        for i, x in enumerate(tensors):
            if to < self.devices:
                peer = self.rank_at(to)
                operations.append(dist.P2POp(dist.isend, x, peer, self.group, tag=i))
            if received is not None:
                peer = self.rank_at(source)
                operations.append(dist.P2POp(dist.irecv, received[i], peer, self.group, tag=i))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return received


def states_before(
    line: ProcessLine, steps: Sequence[StateMap], borders: SegmentBorders | None = None
) -> list[Tensor] | None:
    """S_begin of this process, for each of its states; None for the first process (zeros).

    With packed sequences it is S_end of the process before, whose last segment may end there.
    """
    distance = 1
    while distance < line.devices:
        tensors = [x for step in steps for x in step[:2] if x is not None]
        received = line.passed([x.contiguous() for x in tensors], distance)
        if received is not None:
            given, is_open = iter(received), None
            if borders is not None:
                is_open = borders.is_open_before(line.rank, distance, is_reversed=line.is_reversed)
            steps = [
                step.after(
                    step._replace(
                        transition=None if step.transition is None else next(given),
                        state=next(given),
                        is_open=is_open,
                    )
                )
                for step in steps
            ]
        distance *= 2
    return line.passed([step.state.contiguous() for step in steps], 1)


def tensors_sent(line: ProcessLine) -> tuple[int, int]:
    """The numbers of transitions T and of states F that this process sends."""
    rounds, distance = 0, 1
    while distance < line.devices:
        rounds += line.place + distance < line.devices
        distance *= 2
    return rounds, rounds + (line.place + 1 < line.devices)
