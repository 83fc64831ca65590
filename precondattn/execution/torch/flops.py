"""FLOPs of PyTorch's operators, for `torch.utils.flop_counter.FlopCounterMode`.

They are those that the leaves declare (`algebra/flops.py`), whichever backend runs. A leaf that
declares none counts none. A step of one token counts as decoding, a step of more as a full call of
these queries; a cache of tokens counts with all its slots, because only shapes are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.utils import flop_counter

from precondattn.algebra.declaration import FIXED
from precondattn.algebra.names import piece_named
from precondattn.algebra.piece import Piece
from precondattn.arrays import flop_counters

Shapes = Sequence[Sequence[int]]


def _flops(piece: Piece, sizes: Mapping[str, int], work: str) -> int:
    """The sum over the leaves of a piece, for the whole batch."""
    total = 0.0
    for call, axes in zip(piece.program.calls, piece.program.axes, strict=True):
        of_leaf = {letter: axis.size(sizes) for letter, axis in axes.items() if letter != FIXED}
        flops = call.leaf.flops(of_leaf)
        if flops is not None:
            total += getattr(flops, work) * of_leaf.get("b", 1)
    return int(total)


def _full(name: str, tensors: Shapes, work: str) -> int:
    piece = piece_named(name)
    shapes = dict(zip(piece.inputs, map(tuple, tensors), strict=True))
    return _flops(piece, piece.inputs.sizes(name, shapes), work)


def _step(name: str, past: Shapes, tensors: Shapes, work: str) -> int:
    piece = piece_named(name)
    shapes = dict(zip(piece.inputs, map(tuple, tensors), strict=True))
    sizes = piece.inputs.extending().sizes(name, shapes)
    for (_, pattern), shape in zip(piece.program.slots.values(), past, strict=True):
        if pattern.keeps_tokens:
            sizes["c"] = shape[pattern.letters.index("c")]
    sizes["s"] = sizes.get("c", 0) + sizes["t"]
    is_decoding = work == "forward" and sizes["t"] == 1
    return _flops(piece, sizes, "decode" if is_decoding else work)


def _forward(piece: str, backend: str, tensors: Shapes, *rest: object, **named: object) -> int:
    return _full(piece, tensors, "forward")


def _backward(piece: str, backend: str, tensors: Shapes, *rest: object, **named: object) -> int:
    return _full(piece, tensors, "backward")


def _forward_step(
    piece: str, backend: str, past: Shapes, tensors: Shapes, *rest: object, **named: object
) -> int:
    return _step(piece, past, tensors, "forward")


def _backward_step(
    piece: str, backend: str, past: Shapes, tensors: Shapes, *rest: object, **named: object
) -> int:
    return _step(piece, past, tensors, "backward")


_operators = torch.ops.precondattn
_FORMULAS = {
    _operators.forward: _forward,
    _operators.inference: _forward,
    _operators.backward: _backward,
    _operators.step: _forward_step,
    _operators.extension: _forward_step,
    _operators.step_backward: _backward_step,
}
for _operator, _formula in _FORMULAS.items():
    flop_counter.register_flop_formula(_operator)(_formula)


def register() -> None:
    """Add the formulas to the counters that are active: each copied the registry when created."""
    for counter in flop_counters():
        for operator in _FORMULAS:
            counter.flop_registry[operator] = flop_counter.flop_registry[operator]
