"""Leaves that compute each token by itself: nothing is sent (`tokens_torch.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from precondattn.parallel.layouts import Order

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Leaf
    from precondattn.parallel.piece_torch import Piece

MASKS = ("lengths", "key_mask", "segment_ids", "cu_seqlens")
PASSED = ""


def refusal(leaf: Leaf, order: Order) -> str | None:
    """None: any order of tokens will do."""
    return None


def output(piece: Piece) -> Tensor:
    """The output of this process's tokens."""
    out: Tensor = piece.processes.together(
        lambda: piece.leaf(**piece.inputs, backend=piece.backend)
    )
    return out


def bytes_sent(piece: Piece) -> dict[str, int]:
    return {}
