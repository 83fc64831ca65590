"""Leaves that compute each token alone and have no cache (`cached.py`)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from precondattn.parallel.torch import local
from precondattn.parallel.torch.piece import DividedPiece
from precondattn.parallel.torch.step import DividedStep, Shape


def prefilled(
    piece: DividedPiece, begin: Mapping[str, Tensor] | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of this process's tokens, and no rows."""
    return local.output(piece), {}


def part_shape(step: DividedStep) -> Shape | None:
    """None: nothing is exchanged."""
    return None


def stepped(step: DividedStep, parts: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of the new tokens, computed by every process."""
    return step.leaf(**step.inputs, backend=step.backend), {}
