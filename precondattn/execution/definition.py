"""A piece by the definitions of its leaves, in operations that a framework can differentiate.

Second derivatives in PyTorch and in JAX are derivatives of these functions.
"""

from __future__ import annotations

from precondattn.algebra.piece import Piece
from precondattn.arrays import Array, ByName, upcast_all
from precondattn.cache import Update, Updates
from precondattn.frame import Frame
from precondattn.reversed_order import reversed_keys


def output(piece: Piece, inputs: ByName, frame: Frame) -> Array:
    values, are_reversed = dict(inputs), piece.program.reversed_values
    for call in piece.program.calls:
        x = upcast_all({formal: values[value] for formal, value in call.arguments})
        frame_of_call = frame if call.reads.isdisjoint(are_reversed) else reversed_keys(frame)
        values[call.out] = call.leaf.forward(x, frame_of_call)[0]
    return values[piece.program.out]


def step(piece: Piece, past: ByName, inputs: ByName, frame: Frame) -> tuple[Array, Updates]:
    """The output for new tokens, and the update of every buffer."""
    values, updates = dict(inputs), dict[str, Update]()
    for call in piece.program.calls:
        keys = call.slot_keys()
        x = upcast_all({formal: values[value] for formal, value in call.arguments})
        buffers = upcast_all({slot: past[key] for slot, key in keys.items()})
        values[call.out], new = call.leaf.step(buffers, x, frame)
        for slot, key in keys.items():
            updates.setdefault(key, new[slot])
    return values[piece.program.out], updates
