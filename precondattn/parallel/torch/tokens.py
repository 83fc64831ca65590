"""The layouts that divide tokens: a process keeps its tokens, and each leaf is divided separately.

A composition is a program, which is a list of leaf calls. A leaf is divided in one of these ways:

    local     leaves that compute each token alone, such as norms and feature maps (`local.py`)
    ring      softmax attention: keys and values go around a ring               (`ring.py`)
    gathered  PaTH, and softmax attention with a window, gate or sink: every process gathers all
              keys                                                              (`gathered.py`)
    solve     LUCID: solved blocks are broadcast                                (`solve.py`)
    scan      recurrences: a scan gives the state before a process's tokens     (`states.py`)

All of them use the layout's order of tokens. A scan needs consecutive tokens on each process.

In half precision, values that are sent are in the call's dtype, and the others in float32
(`half_precision.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from precondattn.algebra.declaration import Pattern
from precondattn.algebra.mechanism import Leaf, TokenWise, leaf_of
from precondattn.arrays import cast
from precondattn.parallel.half_precision import inputs_in_half
from precondattn.parallel.ring_reads import goes_around
from precondattn.parallel.states import SUMS
from precondattn.parallel.torch import gathered, local, ring, solve, states
from precondattn.parallel.torch.call import DividedCall, MeshProcesses
from precondattn.parallel.torch.piece import DividedMasks, DividedPiece, masks_of
from precondattn.spec.linear_family import LinearFamily
from precondattn.spec.lucid import LucidSolve
from precondattn.spec.path import Path
from precondattn.spec.softmax import Softmax

if TYPE_CHECKING:
    from precondattn.algebra.leaf_protocol import LeafCall, LeafProtocol
    from precondattn.algebra.mechanism import Mechanism

HALF = (torch.float16, torch.bfloat16)

WAYS: Mapping[type[Leaf], ModuleType] = {
    TokenWise: local,
    Softmax: ring,
    Path: gathered,
    LucidSolve: solve,
    LinearFamily: states,
    **dict.fromkeys(SUMS, states),
}


def refusal(mechanism: Mechanism, call: DividedCall, processes: MeshProcesses) -> str | None:
    """The reason why these layouts can not divide a call; None if they can."""
    if call.tokens["t"] != call.tokens["s"]:
        return (
            f"expects as many queries as keys on every process; found {call.tokens['t']} and "
            f"{call.tokens['s']}"
        )
    assert call.order is not None  # Only `heads` has none.
    for leaf in mechanism.program.leaves:
        way = way_of(leaf)
        if way is None:
            return f"has no way to divide the tokens of {leaf}"
        reason: str | None = way.refusal(leaf, call.order)
        if reason is not None:
            return reason
    try:
        call.order.parts(call.tokens["t"])
    except ValueError as error:
        return str(error)
    return None


def output(call: DividedCall, processes: MeshProcesses) -> Tensor:
    """The output of this process's tokens."""
    masks = processes.together(lambda: masks_of(call, processes))
    return computed(call, processes, masks, lambda number, way, piece: way.output(piece))


def computed(
    call: DividedCall,
    processes: MeshProcesses,
    masks: DividedMasks,
    output_of: Callable[[int, ModuleType, DividedPiece], Tensor],
) -> Tensor:
    """The output of this process's tokens; `output_of` computes the output of each leaf call.

    Its arguments are the number of the leaf call in the program, the module that divides it, and
    the leaf call's arguments.
    """
    rank, program = processes.rank, call.mechanism.program
    values = masks.without_padding(rank, call.bound.inputs, call.bound.patterns)
    dtype = _dtype(call.bound.inputs)
    pieces = _pieces(call, processes, masks, values)
    for number, (leaf_call, way, piece) in enumerate(pieces):
        if dtype in HALF:
            given = leaf_call, piece.inputs, call.bound.inputs, dtype, call.backend
            in_half = partial(inputs_in_half, *given, sends_values=way.SENDS_VALUES)
            piece = piece._replace(inputs=processes.together(in_half))
        values[leaf_call.out] = output_of(number, way, piece)
    out = {program.out: cast(values[program.out], dtype)}
    return masks.without_padding(rank, out, {program.out: program.output})[program.out]


def during(call: DividedCall, processes: MeshProcesses) -> str:
    """What a process has in memory during the call, in words."""
    count = call.tokens["t"][processes.rank]
    ways = [way_of(leaf) for leaf in call.mechanism.program.leaves]
    passed = dict.fromkeys(way.PASSED for way in ways if way is not None and way.PASSED)
    return f"{count} tokens of all heads, {', '.join(passed) or 'nothing of others'}"


def bytes_sent(call: DividedCall, processes: MeshProcesses) -> dict[str, int]:
    """The bytes that this process sends forward, by array and value of the program."""
    sent: dict[str, int] = {}
    masks = masks_of(call, processes, is_planned=True)
    values = {name: x.to("meta") for name, x in call.bound.inputs.items()}
    for leaf_call, way, piece in _pieces(call, processes, masks, values):
        for name, count in way.bytes_sent(piece).items():
            sent[f"{name} for {leaf_call.out}"] = count
        values[leaf_call.out] = like_output(piece.leaf, piece.inputs)
    return sent


def _pieces(
    call: DividedCall, processes: MeshProcesses, masks: DividedMasks, values: Mapping[str, Tensor]
) -> Iterator[tuple[LeafCall, ModuleType, DividedPiece]]:
    """The leaf calls in order, with the modules that divide them.

    `values` has the inputs, and the outputs of earlier leaf calls.
    """
    assert call.order is not None  # Only `heads` has none.
    parts = call.order.parts(call.tokens["t"])
    for leaf_call in call.mechanism.program.calls:
        inputs = {name: values[value] for name, value in leaf_call.arguments}
        way = way_of(leaf_call.leaf)
        assert way is not None  # `refusal` has checked it.
        yield (
            leaf_call,
            way,
            DividedPiece(leaf_of(leaf_call), inputs, parts, masks, processes, call.backend),
        )


def _dtype(inputs: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype of a call and of its output, given its inputs."""
    return inputs.get("v", next(iter(inputs.values()))).dtype


def like_output(leaf: LeafProtocol, inputs: Mapping[str, Tensor]) -> Tensor:
    """A tensor of the shape and dtype of a leaf's output, without data."""
    shapes = {name: tuple(x.shape) for name, x in inputs.items()}
    shape = Pattern.read(leaf.output).shape(leaf.inputs.sizes(str(leaf), shapes))
    return torch.empty(shape, dtype=_dtype(inputs), device="meta")


def way_of(leaf: LeafProtocol) -> ModuleType | None:
    """The module that divides the tokens of a leaf; None if there is none."""
    way = next((way for kind, way in WAYS.items() if isinstance(leaf, kind)), None)
    return gathered if way is ring and not goes_around(leaf) else way
