"""The ways in which the tokens of a leaf are divided, for PyTorch and JAX.

A composition is a program, which is a list of leaf calls. A leaf is divided in one of these ways:

    local     leaves that compute each token alone, such as norms and feature maps: nothing is sent
    ring      softmax attention: keys and values go around a ring               (`ring.py`)
    gathered  PaTH, and softmax attention with a window, gate or sink: every device gathers all
              keys                                                              (`gathered.py`)
    solve     LUCID: solved blocks are broadcast                                (`solve.py`)
    states    recurrences: a scan gives the state before a device's tokens      (`states.py`)

All of them use the layout's order of tokens. A scan needs consecutive tokens on each device.

Leaves compute in float32 or wider. In a call in half precision, a leaf that sends no values to
other devices reads the float32 results of earlier leaves, as on one device. A leaf that sends
values reads them in the call's half precision, so that half as many bytes are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from precondattn.algebra.leaf_protocol import LeafCall, LeafProtocol
from precondattn.algebra.mechanism import Leaf, TokenWise, leaf_of
from precondattn.arrays import HALF, Array, Tree, cast, dtype_name, upcast_all
from precondattn.dispatch.discovery import discover
from precondattn.execution.array_checks import values_of
from precondattn.parallel import solve, states
from precondattn.parallel.heads import DividedCall
from precondattn.parallel.layouts import TokenOrder
from precondattn.parallel.masks import DividedMasks
from precondattn.parallel.ring_reads import goes_around
from precondattn.spec.linear_family import LinearFamily
from precondattn.spec.lucid import LucidSolve
from precondattn.spec.path import Path
from precondattn.spec.softmax import Softmax

LeafOfWay = Any
"""A leaf of the kind that `WAYS` has for the way that divides it."""


class DividedPiece(NamedTuple):
    """A leaf call whose tokens are divided."""

    leaf: LeafOfWay
    inputs: dict[str, Array]
    """Arrays by the leaf's input names"""
    masks: DividedMasks
    """The masks of all devices"""
    call: DividedCall


@dataclass(frozen=True)
class Way:
    """A way to divide the tokens of a leaf."""

    sends_values: bool
    """Whether the leaf's inputs are sent"""
    refusal: Callable[[Leaf, TokenOrder], str | None]
    """The reason why a leaf can not be divided like this; None if it can"""


def gathered_inputs(leaf: Leaf) -> list[str]:
    """The names of the inputs that have a row for each key."""
    return [name for name, pattern in leaf.inputs.items() if "s" in pattern.letters]


def _refusal_of_local(leaf: Leaf, order: TokenOrder) -> str | None:
    return None if leaf.offers.causal else f"divides tokens, and {leaf} is computed of all"


def _refusal_of_gathered(leaf: Leaf, order: TokenOrder) -> str | None:
    for name, pattern in leaf.inputs.items():
        if {"t", "s"} <= set(pattern.letters):
            return f"divides tokens, and {name} of {leaf} is of pairs"
    if not leaf.offers.causal:
        return f"gathers the keys before a query, and {leaf} is not causal"
    return None


LOCAL = Way(False, _refusal_of_local)
RING = Way(True, lambda leaf, order: None)
GATHERED = Way(True, _refusal_of_gathered)
SOLVE = Way(True, solve.refusal)
STATES = Way(False, states.refusal)

WAYS: Mapping[type[Leaf], Way] = {
    TokenWise: LOCAL,
    Softmax: RING,
    Path: GATHERED,
    LucidSolve: SOLVE,
    LinearFamily: STATES,
    **dict.fromkeys(states.SUMS, STATES),
}


def way_of(leaf: LeafProtocol) -> Way | None:
    """The way to divide the tokens of a leaf; None if there is none."""
    way = next((way for kind, way in WAYS.items() if isinstance(leaf, kind)), None)
    return GATHERED if way is RING and not goes_around(leaf) else way


def refusal(call: DividedCall) -> str | None:
    """The reason why the tokens of a call can not be divided; None if they can."""
    for leaf in map(leaf_of, call.mechanism.program.calls):
        way = way_of(leaf)
        if way is None:
            return f"has no way to divide the tokens of {leaf}"
        reason = way.refusal(leaf, call.order)
        if reason is not None:
            return reason
    try:
        call.order.parts(call.counts)
    except ValueError as error:
        return str(error)
    return None


def computed(
    call: DividedCall,
    inputs: Mapping[str, Array],
    masks: DividedMasks,
    output_of: Callable[[int, Way, DividedPiece], Array],
    together: Callable[[Callable[[], Tree]], Tree] = lambda function: function(),
) -> Array:
    """The output of a device's tokens; `output_of` computes the output of each leaf call.

    Its arguments are the number of the leaf call in the program, the way that divides it, and the
    leaf call's arguments. `together` calls a function, and agrees on its error with other devices.
    """
    program, dtype = call.mechanism.program, values_of(inputs).dtype
    is_half = dtype_name(values_of(inputs)) in HALF
    values = masks.without_padding(call.rank, inputs, call.mechanism.inputs)
    for number, leaf_call in enumerate(program.calls):
        way, arguments = way_of(leaf_call.leaf), {n: values[v] for n, v in leaf_call.arguments}
        assert way is not None  # `refusal` has checked it.
        piece = DividedPiece(leaf_of(leaf_call), arguments, masks, call)
        if is_half:
            in_half = partial(_inputs_in_half, leaf_call, way, piece, inputs)
            piece = piece._replace(inputs=together(in_half))
        values[leaf_call.out] = output_of(number, way, piece)
    out = {program.out: cast(values[program.out], dtype)}
    return masks.without_padding(call.rank, out, {program.out: program.output})[program.out]


def _inputs_in_half(
    leaf_call: LeafCall, way: Way, piece: DividedPiece, of_call: Mapping[str, Array]
) -> dict[str, Array]:
    """The inputs of a leaf: in half precision, or in float32 if it sends none.

    Its backends must take float32. The inputs `of_call` keep their dtype.
    """
    dtype = values_of(of_call).dtype
    in_dtype = {
        name: piece.inputs[name] if value in of_call else cast(piece.inputs[name], dtype)
        for name, value in leaf_call.arguments
    }
    if way.sends_values:
        return in_dtype
    backends: Iterable[str] = piece.leaf.explain(**in_dtype, backend=piece.call.backend).backends
    is_wide = all(discover().named(name).wide_values for name in backends)
    return upcast_all(piece.inputs) if is_wide else in_dtype
