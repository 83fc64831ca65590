"""Leaves that compute each token by itself have no cache (`cached_torch.py`)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from precondattn.parallel import local_torch
from precondattn.parallel.piece_torch import Piece
from precondattn.parallel.step_torch import Shape, Step


def prefilled(piece: Piece, begin: Mapping[str, Tensor] | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of this process's tokens."""
    return local_torch.output(piece), {}


def part_shape(step: Step) -> Shape | None:
    """None: nothing is exchanged."""
    return None


def stepped(step: Step, parts: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of the new tokens, computed by every process."""
    return step.leaf(**step.inputs, backend=step.backend), {}
