"""What all layouts know of a call: who takes part, and what they have agreed on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from weakref import ReferenceType, ref

import torch
from torch.distributed.device_mesh import DeviceMesh

from precondattn.parallel.layouts import TokenOrder
from precondattn.parallel.torch.agreement import agreed
from precondattn.parallel.torch.arguments import Bound

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from precondattn.algebra.mechanism import Mechanism
    from precondattn.algebra.piece import BackendNames

Result = TypeVar("Result")


@dataclass(frozen=True)
class MeshProcesses:
    """Those of a mesh of one dimension, and this one among them."""

    owner: str
    """The name of the call in errors"""
    weak_group: ReferenceType[ProcessGroup]
    """PyTorch has the group until it is destroyed. What is kept of a call, such as a graph of
    autograd, must not have it any longer: then its threads would run on until the process ends."""
    rank: int
    devices: int
    device: torch.device

    @property
    def group(self) -> ProcessGroup:
        group = self.weak_group()
        if group is None:
            raise RuntimeError(f"{self.owner}: the process group has been destroyed")
        return group

    def together(self, function: Callable[[], Result]) -> Result:
        """function(), unless it is an error on any process, which all raise then."""
        result, error = tried(function)
        self.agree(error)
        return result  # type: ignore[return-value]

    def agree(
        self, error: Exception | None, called: str = "", numbers: Sequence[int] = ()
    ) -> list[list[int]]:
        """Raise the error of any process, on all of them; or the `numbers` of each (`agreed`)."""
        return agreed(self.owner, self.group, self.device, called, numbers, error)


def check_mesh(owner: str, mesh: object, example: str) -> None:
    """Raise an error for what is no mesh of one dimension, such as the example is."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{owner}: mesh must be a DeviceMesh, such as {example}; found {type(mesh).__name__}"
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"{owner}: mesh must have one dimension, such as {example}; found {mesh.ndim}"
        )


def processes_of(owner: str, mesh: DeviceMesh) -> MeshProcesses:
    """Those of a mesh of one dimension."""
    group, rank = ref(mesh.get_group()), mesh.get_local_rank()
    return MeshProcesses(owner, group, rank, mesh.size(), device_of(mesh))


def device_of(mesh: DeviceMesh) -> torch.device:
    """Where tensors are that processes exchange."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def tried(function: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """function(), or its error, for a process that takes part in exchanges before all raise it."""
    try:
        return function(), None
    except Exception as error:
        return None, error


class DividedCall(NamedTuple):
    """A call that all processes have agreed on."""

    mechanism: Mechanism
    bound: Bound
    tokens: dict[str, tuple[int, ...]]
    """The numbers of queries `t` and keys `s` of every process"""
    sizes: dict[str, int]
    """By letter, for all tokens"""
    backend: BackendNames
    order: TokenOrder | None = None
    """That of the tokens, in the layouts that divide them"""
