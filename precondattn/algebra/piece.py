"""What dispatch, execution and backends may ask of a piece: a mechanism, a leaf, or a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from precondattn.algebra.declaration import Inputs
from precondattn.algebra.offers import Offers
from precondattn.algebra.program import Program
from precondattn.arrays import Array

BackendNames = str | tuple[str, ...] | None
"""The backends that a call allows: one, several in order of preference, or None for any."""
ExtendPullback = Callable[..., tuple[dict[str, Array], dict[str, Array]]]
"""From the cotangents of an extension to the gradients of its inputs and of the old cache."""


class Piece(Protocol):
    """A piece, as those see it that neither construct nor compose one. Hashable."""

    def __hash__(self) -> int: ...
    @property
    def inputs(self) -> Inputs: ...
    @property
    def program(self) -> Program: ...
    @property
    def offers(self) -> Offers: ...
    @property
    def numbers_heads(self) -> bool: ...
    @property
    def mixes_sequences(self) -> bool: ...
    @property
    def _name(self) -> str:
        """Its name in PyTorch's operators (`names.py`)."""

    @property
    def _positional(self) -> tuple[str, ...]:
        """The inputs that a call may give by position."""
