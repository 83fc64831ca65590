"""What dispatch, execution and backends may ask of a piece: a mechanism, a leaf, or a group."""

from __future__ import annotations

from collections.abc import Callable

from precondattn.algebra.leaf_protocol import Described
from precondattn.algebra.program import Program
from precondattn.arrays import Array

BackendNames = str | tuple[str, ...] | None
"""The backends that a call allows: one, several in order of preference, or None for any."""
ExtendPullback = Callable[..., tuple[dict[str, Array], dict[str, Array]]]
"""From the cotangents of an extension to the gradients of its inputs and of the old cache."""


class Piece(Described):
    """A piece, as those see it that neither construct nor compose one. Hashable."""

    _name: str
    """Its name in PyTorch's operators (`names.py`). Dynamo reads it as a constant."""

    @property
    def program(self) -> Program:
        """Its leaf calls, in order."""
        raise NotImplementedError

    @property
    def numbers_heads(self) -> bool:
        """Whether the output of a head depends on its number among all heads."""
        return any(leaf.numbers_heads for leaf in self.program.leaves)

    @property
    def mixes_sequences(self) -> bool:
        """Whether an output depends on the other sequences of its batch."""
        return any(leaf.mixes_sequences for leaf in self.program.leaves)
