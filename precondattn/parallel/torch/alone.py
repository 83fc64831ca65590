"""Leaves that compute each token alone; nothing is sent or cached."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from precondattn.parallel.torch.step import DividedStep
from precondattn.parallel.ways import DividedPiece


def output(piece: DividedPiece) -> Tensor:
    """The output of this process's tokens."""
    call = piece.call
    out: Tensor = call.processes.together(lambda: piece.leaf(**piece.inputs, backend=call.backend))
    return out


def prefilled(
    piece: DividedPiece, begin: Mapping[str, Tensor] | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of this process's tokens, and no rows."""
    return output(piece), {}


def stepped(step: DividedStep, parts: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of the new tokens, computed by every process."""
    return step.leaf(**step.inputs, backend=step.new.backend), {}
