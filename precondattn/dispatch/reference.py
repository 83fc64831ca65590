"""The reference backend: the leaves' own methods, on any array library.

It consists of plain differentiable code. Half-precision inputs are converted to float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from precondattn.arrays import Array, ByName, upcast_all
from precondattn.backend import Backend, Request, Runner
from precondattn.cache import Updates
from precondattn.cache.slots import held_part
from precondattn.frame import Frame
from precondattn.runner import LeafRunner

if TYPE_CHECKING:
    from precondattn.algebra.piece import Piece
    from precondattn.arrays import Arrays


class Reference(Backend):
    """The backend of each leaf's own methods; memory is quadratic in the number of tokens."""

    name = "reference"
    preference = -1_000_000
    wide_values = True
    masks_pairs = True

    def prepare(self, piece: Piece, request: Request) -> Runner | str:
        if len(piece.program.calls) > 1:
            return "runs one leaf at a time"
        # Otherwise a compiler unrolls loops over tokens, and compiles again for every length.
        is_operator = request.is_symbolic and not request.verb.startswith("extend")
        return _Definition(piece, piece, differentiable=not is_operator)


class _Definition(LeafRunner):
    """The runner of a leaf's own methods, on the filled part of a cache."""

    def step(self, past: ByName, inputs: ByName, frame: Frame) -> tuple[Array, Updates]:
        buffers = {slot: past[key] for slot, key in self.keys.items()}
        buffers, frame = held_part(self.methods.slots(), buffers, frame)
        out, updates = self.methods.step(upcast_all(buffers), upcast_all(inputs), frame)
        return out, {self.keys[slot]: update for slot, update in updates.items()}

    def by_slot(self, buffers: ByName) -> Arrays:
        return upcast_all(super().by_slot(buffers))
