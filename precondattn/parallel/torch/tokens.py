"""The layouts that divide tokens: a process keeps its tokens, and each leaf is divided separately.

`precondattn/parallel/ways.py` lists the ways to divide a leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from precondattn.arrays import cast
from precondattn.parallel import ways
from precondattn.parallel.masks import DividedMasks
from precondattn.parallel.torch import alone, gathered, ring, solve, states
from precondattn.parallel.torch.call import DividedCall
from precondattn.parallel.torch.piece import DividedPiece, masks_of
from precondattn.parallel.ways import Way

if TYPE_CHECKING:
    from precondattn.algebra.leaf_protocol import LeafProtocol
    from precondattn.algebra.mechanism import Leaf

HALF = (torch.float16, torch.bfloat16)

OUTPUTS: Mapping[Way, Callable[[DividedPiece], Tensor]] = {
    ways.LOCAL: alone.output,
    ways.RING: ring.output,
    ways.GATHERED: gathered.output,
    ways.SOLVE: solve.output,
    ways.STATES: states.output,
}


def refusal(call: DividedCall) -> str | None:
    """The reason why these layouts can not divide a call; None if they can."""
    if call.tokens["t"] != call.tokens["s"]:
        return (
            f"expects as many queries as keys on every process; found {call.tokens['t']} and "
            f"{call.tokens['s']}"
        )
    assert call.order is not None  # Only `heads` has none.
    reason = ways.refusal(call.mechanism.program, call.order)
    if reason is None:
        try:
            call.order.parts(call.tokens["t"])
        except ValueError as error:
            return str(error)
    return reason


def output(call: DividedCall) -> Tensor:
    """The output of this process's tokens."""
    masks = call.processes.together(lambda: masks_of(call))
    return computed(call, masks, lambda number, way, piece: OUTPUTS[way](piece))


def computed(
    call: DividedCall,
    masks: DividedMasks,
    output_of: Callable[[int, Way, DividedPiece], Tensor],
) -> Tensor:
    """The output of this process's tokens; `output_of` computes the output of each leaf call.

    Its arguments are the number of the leaf call in the program, the way that divides it, and the
    leaf call's arguments.
    """
    processes, program, inputs = call.processes, call.mechanism.program, call.bound.inputs
    values = masks.without_padding(processes.rank, inputs, call.bound.patterns)
    dtype = _dtype(inputs)
    pieces = ways.pieces(program, values, partial(_piece, call, masks))
    for number, (leaf_call, way, piece) in enumerate(pieces):
        if dtype in HALF:
            of_leaf = leaf_call, way, piece.inputs, inputs, dtype, call.backend
            in_half = processes.together(partial(ways.inputs_in_half, *of_leaf))
            piece = piece._replace(inputs=in_half)
        values[leaf_call.out] = output_of(number, way, piece)
    out = {program.out: cast(values[program.out], dtype)}
    return masks.without_padding(processes.rank, out, {program.out: program.output})[program.out]


def during(call: DividedCall) -> str:
    """What a process has in memory during the call, in words."""
    count = call.tokens["t"][call.processes.rank]
    of_others = ways.during(call.mechanism.program, "process", "processes")
    return f"{count} tokens of all heads, {of_others}"


def bytes_sent(call: DividedCall) -> dict[str, int]:
    """The bytes that this process sends forward, by array and value of the program."""
    values = {name: x.to("meta") for name, x in call.bound.inputs.items()}
    piece_of = partial(_piece, call, DividedMasks())
    return ways.bytes_sent(call.mechanism.program, values, piece_of, like_output)


def _piece(
    call: DividedCall, masks: DividedMasks, leaf: Leaf, inputs: dict[str, Tensor]
) -> DividedPiece:
    return DividedPiece(leaf, inputs, call.parts, masks, call.processes, call.backend)


def _dtype(inputs: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype of a call and of its output, given its inputs."""
    return inputs.get("v", next(iter(inputs.values()))).dtype


def like_output(leaf: LeafProtocol, inputs: Mapping[str, Tensor]) -> Tensor:
    """A tensor of the shape and dtype of a leaf's output, without data."""
    shape = ways.output_shape(leaf, inputs)
    return torch.empty(shape, dtype=_dtype(inputs), device="meta")
