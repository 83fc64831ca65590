"""A call as all layouts receive it: the processes, and the arguments they have agreed on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from precondattn.execution.array_checks import values_of
from precondattn.parallel.heads import HeadAxes
from precondattn.parallel.layouts import TokenOrder, TokenPart
from precondattn.parallel.torch.agreement import agreed
from precondattn.parallel.torch.arguments import Bound
from precondattn.parallel.ways import output_shape

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from precondattn.algebra.leaf_protocol import LeafProtocol
    from precondattn.algebra.mechanism import Leaf, Mechanism
    from precondattn.algebra.piece import BackendNames

Result = TypeVar("Result")


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
        """The `numbers` of each process (`agreed`); raises the error of any process on all."""
        return agreed(self.owner, self.group, self.device, called, numbers, error)


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
    group, rank = ref(mesh.get_group()), mesh.get_local_rank()
    return MeshProcesses(owner, group, rank, mesh.size(), device_of(mesh))


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device of the tensors that processes exchange."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def tried(function: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """The result of function(), or its error, which is raised after the next exchange."""
    try:
        return function(), None
    except Exception as error:
        return None, error


@dataclass(frozen=True)
class DividedCall:
    """A call that all processes have agreed on."""

    mechanism: Mechanism
    processes: MeshProcesses
    bound: Bound
    tokens: dict[str, tuple[int, ...]]
    """The number of queries (key "t") and of keys (key "s") on every process"""
    sizes: dict[str, int]
    """The size of each dimension letter, with all tokens"""
    backend: BackendNames
    order: TokenOrder | None = None
    """The order of the tokens; None in the layout `heads`"""

    nouns = ("process", "processes")
    broadcasts = 1
    """The number of times that a broadcast array is sent"""

    @property
    def devices(self) -> int:
        return self.processes.devices

    @property
    def rank(self) -> int:
        return self.processes.rank

    place = rank
    """The process whose bytes are counted"""

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of tokens of each process."""
        return self.tokens["t"]

    @property
    def axes(self) -> Mapping[str, HeadAxes]:
        return self.bound.axes

    @property
    def described(self) -> dict[str, Tensor]:
        """The inputs without data."""
        return {name: x.to("meta") for name, x in self.bound.inputs.items()}

    @property
    def sizes_of_device(self) -> dict[str, int]:
        """The size of each dimension letter, with this process's tokens."""
        return self.sizes | {letter: counts[self.rank] for letter, counts in self.tokens.items()}

    @cached_property
    def parts(self) -> tuple[TokenPart, ...]:
        """All parts of the sequence, in the order of the sequence."""
        assert self.order is not None  # Only `heads` has none.
        return self.order.parts(self.counts)

    def parts_of(self, process: int) -> list[TokenPart]:
        """The parts of one process, in the order of the sequence."""
        return [part for part in self.parts if part.device == process]

    def refusal_of_tokens(self) -> str | None:
        """The reason why the tokens can not be divided; None if they can."""
        if self.tokens["t"] != self.tokens["s"]:
            return (
                f"expects as many queries as keys on every process; found {self.tokens['t']} and "
                f"{self.tokens['s']}"
            )
        return None

    def states_of(self, leaf: Leaf, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The leaf's empty states."""
        return leaf.init_cache(**inputs).store

    @staticmethod
    def like_output(leaf: LeafProtocol, inputs: Mapping[str, Tensor]) -> Tensor:
        """A tensor of the shape and dtype of a leaf's output, for inputs without data."""
        like: Tensor = values_of(inputs)
        return like.new_empty(output_shape(leaf, inputs))
