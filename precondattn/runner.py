"""The runner of an object with the methods of a leaf, such as the leaf itself or an algorithm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from precondattn.arrays import Array, ByName, upcast, upcast_all
from precondattn.backend import ArraySpec, Runner
from precondattn.cache import Updates
from precondattn.frame import Frame

if TYPE_CHECKING:
    from precondattn.algebra.piece import Piece
    from precondattn.arrays import Arrays, Residuals


LeafMethods = Any


class LeafRunner(Runner):
    """The runner of a piece in float32 or float64, by an object with the methods of a leaf.

    These methods get the buffers by the leaf's names for its slots, or by the group's for a group.
    """

    def __init__(
        self,
        piece: Piece,
        methods: LeafMethods,
        *,
        algorithm: str = "",
        differentiable: bool = False,
    ) -> None:
        self.piece, self.methods = piece, methods
        self.algorithm, self.differentiable = algorithm, differentiable
        program = piece.program
        is_leaf = len(program.calls) == 1
        self.keys = program.slot_keys[0] if is_leaf else {key: key for key in program.slots}

    def forward(self, inputs: ByName, frame: Frame) -> tuple[Array, Residuals]:
        out, residuals = self.methods.forward(upcast_all(inputs), frame)
        return out, residuals

    def backward(
        self, inputs: ByName, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        arrays = (upcast_all(inputs), frame, upcast(out), residuals, upcast(cotangent))
        gradients: Arrays = self.methods.backward(*arrays)
        return gradients

    def step(self, past: ByName, inputs: ByName, frame: Frame) -> tuple[Array, Updates]:
        buffers = self.by_slot(past)
        out, updates = self.methods.step(buffers, upcast_all(inputs), frame)
        return out, dict(zip(map(self.keys.__getitem__, updates), updates.values(), strict=True))

    def states_between(
        self, past: ByName, inputs: ByName, frame: Frame, columns: Sequence[int]
    ) -> tuple[Array, Arrays] | None:
        """The output, and the states (b, n + 1, …) after n `columns` and all tokens, or None."""
        if not hasattr(self.methods, "states_between"):
            return None
        arguments = self.by_slot(past), upcast_all(inputs), frame, columns
        out_and_states = self.methods.states_between(*arguments)
        if out_and_states is None:
            return None
        out, states = out_and_states
        return out, {self.keys[slot]: state for slot, state in states.items()}

    def step_backward(
        self, past: ByName, inputs: ByName, frame: Frame, cotangent: Array, d_buffers: ByName
    ) -> tuple[Arrays, Arrays]:
        arrays = (upcast_all(inputs), frame, upcast(cotangent), self.by_slot(d_buffers))
        gradients, d_past = self.methods.step_backward(self.by_slot(past), *arrays)
        return gradients, {self.keys[slot]: d_buffer for slot, d_buffer in d_past.items()}

    def residual_shapes(
        self, inputs: Mapping[str, ArraySpec], frame: Frame
    ) -> tuple[ArraySpec, ...]:
        """No residuals: a leaf declares none, and `backward` runs its definition again."""
        return ()

    def by_slot(self, buffers: ByName) -> Arrays:
        """The buffers by the names that `methods` use."""
        return dict(zip(self.keys, map(buffers.__getitem__, self.keys.values()), strict=True))
