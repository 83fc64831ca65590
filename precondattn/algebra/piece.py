"""The interface of pieces (mechanisms, leaves and groups) for dispatch, execution and backends."""

from __future__ import annotations

from collections.abc import Callable

from precondattn.algebra.leaf_protocol import Described
from precondattn.algebra.program import Program
from precondattn.arrays import Array

BackendNames = str | tuple[str, ...] | None
"""The backends that a call allows: a name, names in order of preference, or None for all."""
ExtendPullback = Callable[..., tuple[dict[str, Array], dict[str, Array]]]


class Piece(Described):
    """The interface of a piece for code that does not construct or compose pieces. Hashable."""

    _name: str
    """The name in PyTorch's operators (`names.py`), which Dynamo reads as a constant."""

    @property
    def program(self) -> Program:
        """The leaf calls of the piece, in order."""
        raise NotImplementedError

    @property
    def numbers_heads(self) -> bool:
        """Whether the output of a head depends on the head's index."""
        return any(leaf.numbers_heads for leaf in self.program.leaves)

    @property
    def mixes_sequences(self) -> bool:
        """Whether an output depends on the other sequences of its batch."""
        return any(leaf.mixes_sequences for leaf in self.program.leaves)
