"""The FLOPs of the operators, for `torch.utils.flop_counter.FlopCounterMode`.

A leaf that declares none counts as 0. A step with one token counts as decoding, and one with more
tokens as a full call with these queries. All slots of a cache count: only shapes are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch.utils import flop_counter

from precondattn.algebra.declaration import FIXED
from precondattn.algebra.group import piece_named
from precondattn.frameworks.torch.modes import flop_counters

Shapes = Sequence[Sequence[int]]


def _flops(
    work: str, is_step: bool, name: str, backend: str, *shapes: Shapes, **named: object
) -> int:
    """The FLOPs of a piece: the sum over its leaves, for the whole batch."""
    piece = piece_named(name)
    declared = piece.inputs.extending() if is_step else piece.inputs
    past, tensors = shapes[:2] if is_step else ((), shapes[0])
    sizes = declared.sizes(name, dict(zip(declared, map(tuple, tensors), strict=True)))
    if is_step:
        for (_, pattern), shape in zip(piece.program.slots.values(), past, strict=True):
            if pattern.keeps_tokens:
                sizes["c"] = shape[pattern.letters.index("c")]
        sizes["s"] = sizes.get("c", 0) + sizes["t"]
        if work == "forward" and sizes["t"] == 1:
            work = "decode"
    total = 0.0
    for call, axes in zip(piece.program.calls, piece.program.axes, strict=True):
        of_leaf = {letter: axis.size(sizes) for letter, axis in axes.items() if letter != FIXED}
        flops = call.leaf.flops(of_leaf)
        if flops is not None:
            total += getattr(flops, work) * of_leaf.get("b", 1)
    return int(total)


_operators = torch.ops.precondattn
_FORMULAS = {
    _operators.forward: partial(_flops, "forward", False),
    _operators.inference: partial(_flops, "forward", False),
    _operators.backward: partial(_flops, "backward", False),
    _operators.step: partial(_flops, "forward", True),
    _operators.extension: partial(_flops, "forward", True),
    _operators.step_backward: partial(_flops, "backward", True),
}
for _operator, _formula in _FORMULAS.items():
    flop_counter.register_flop_formula(_operator)(_formula)


def register() -> None:
    """Add the formulas to the active counters, which copied the registry when they were created."""
    for counter in flop_counters():
        for operator in _FORMULAS:
            counter.flop_registry[operator] = flop_counter.flop_registry[operator]
