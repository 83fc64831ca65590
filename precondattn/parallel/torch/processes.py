"""The processes of a mesh. All raise the error of one, so that none waits for one that stopped.

Before every exchange each process sends whether it has an error, what it calls, and how many tokens
it has. If one process has an error, or the calls differ, all processes raise the same error.
"""

from __future__ import annotations

import atexit
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from precondattn.backend import UnsupportedError
from precondattn.parallel.torch.exit import wait_for_gloo

Result = TypeVar("Result")

KINDS = (UnsupportedError, TypeError, ValueError, NotImplementedError, RuntimeError)
"""The types of errors that are raised again; an error becomes the first that it is an instance
of, or the last."""

# Every call ends with an agreement, and often a program ends with a call.
atexit.register(wait_for_gloo)


@dataclass(frozen=True)
class MeshProcesses:
    """The processes of a one-dimensional mesh, and the rank of this one."""

    owner: str
    """The name of the call in errors"""
    weak_group: ReferenceType[ProcessGroup]
    """A weak reference to the group, so that objects that outlive a call, such as a graph of
    autograd, do not keep a destroyed group and its threads alive until the process ends."""
    rank: int
    devices: int
    device: torch.device
    """The device of the tensors that processes exchange"""

    @property
    def group(self) -> ProcessGroup:
        group = self.weak_group()
        if group is None:
            raise RuntimeError(f"{self.owner}: the process group has been destroyed")
        return group

    def together(self, function: Callable[[], Result]) -> Result:
        """The result of function(); if it raises on any process, all processes raise its error."""
        result, error = tried(function)
        self.agree(error)
        return result  # type: ignore[return-value]

    def agree_on(
        self,
        bind: Callable[[], Result],
        said: Callable[[Result], str],
        numbers: Callable[[Result], Sequence[int]] = lambda result: (0, 0),
    ) -> tuple[Result, list[list[int]]]:
        """The checked arguments bind() of a call, which all processes describe alike by `said`.

        The `numbers` of each process are the second result.
        """
        result, error = tried(bind)
        if error is not None:
            self.agree(error, "", (0, 0))
        return result, self.agree(None, said(result), numbers(result))  # type: ignore[arg-type, return-value]

    def agree(
        self, error: Exception | None, called: str = "", numbers: Sequence[int] = ()
    ) -> list[list[int]]:
        """The `numbers` of every process, after a check that all processes make the same call.

        If any process has an error, all raise it.
        """
        digest = int.from_bytes(hashlib.blake2b(called.encode(), digest_size=7).digest(), "big")
        message = torch.tensor(
            [error is None, digest, *numbers], dtype=torch.int64, device=self.device
        )
        everyone = [torch.empty_like(message) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(everyone, message, group=self.group)
        rows = [row.tolist() for row in everyone]
        if all(row[0] for row in rows) and len({row[1] for row in rows}) == 1:
            return [row[2:] for row in rows]
        said: list[tuple[int | None, str]] = [(None, "")] * len(rows)
        words = called if error is None else str(error)
        kind = next((i for i, kind in enumerate(KINDS) if isinstance(error, kind)), len(KINDS) - 1)
        dist.all_gather_object(said, (None if error is None else kind, words), group=self.group)
        for rank, (failed, text) in enumerate(said):
            if failed is not None:
                raise KINDS[failed](f"{self.owner}: process {rank}: {text}") from error
        differs = next(rank for rank, of in enumerate(said) if of != said[0])
        raise ValueError(
            f"{self.owner}: all processes must call the same; found on process 0 {said[0][1]}, "
            f"and on process {differs} {said[differs][1]}"
        )


def check_mesh(owner: str, mesh: object, example: str) -> None:
    """Raise an error unless `mesh` is a mesh of one dimension, such as `example`."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{owner}: mesh must be a DeviceMesh, such as {example}; found {type(mesh).__name__}"
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"{owner}: mesh must have one dimension, such as {example}; found {mesh.ndim}"
        )


def processes_of(owner: str, mesh: DeviceMesh) -> MeshProcesses:
    """The processes of a mesh of one dimension, after a check."""
    group, rank, device = ref(mesh.get_group()), mesh.get_local_rank(), torch.device("cpu")
    if mesh.device_type != "cpu":
        device = torch.device(mesh.device_type, torch.accelerator.current_device_index())
    return MeshProcesses(owner, group, rank, mesh.size(), device)


def tried(function: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """The result of function(), or its error, which is raised after the next exchange."""
    try:
        return function(), None
    except Exception as error:
        return None, error
