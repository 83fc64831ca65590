"""A call as all layouts receive it: the processes, and the arguments they have agreed on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.algebra.mechanism import Leaf, Mechanism
from precondattn.algebra.piece import BackendNames
from precondattn.execution.array_checks import values_of
from precondattn.parallel.heads import HeadAxes
from precondattn.parallel.layouts import TokenOrder, TokenPart
from precondattn.parallel.torch.arguments import Bound
from precondattn.parallel.torch.processes import MeshProcesses
from precondattn.parallel.ways import output_shape


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
