"""Leaves that compute each token alone; nothing is sent (`tokens.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from precondattn.parallel.layouts import TokenOrder
from precondattn.parallel.local import refusal as refusal_of_leaf

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Leaf
    from precondattn.parallel.torch.piece import DividedPiece

PASSED = ""
SENDS_VALUES = False


def refusal(leaf: Leaf, order: TokenOrder) -> str | None:
    """The reason why a leaf needs other tokens; None if it computes each token alone."""
    return refusal_of_leaf(leaf)


def output(piece: DividedPiece) -> Tensor:
    """The output of this process's tokens."""
    out: Tensor = piece.processes.together(
        lambda: piece.leaf(**piece.inputs, backend=piece.backend)
    )
    return out


def bytes_sent(piece: DividedPiece) -> dict[str, int]:
    return {}
