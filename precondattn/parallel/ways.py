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
from math import prod
from typing import Any, NamedTuple

from precondattn.algebra.declaration import Pattern
from precondattn.algebra.leaf_protocol import LeafCall, LeafProtocol
from precondattn.algebra.mechanism import Leaf, TokenWise, leaf_of
from precondattn.arrays import HALF, Array, Shape, Tree, cast, dtype_name, upcast_all
from precondattn.dispatch.discovery import discover
from precondattn.execution.array_checks import values_of
from precondattn.execution.input_names import shapes_of
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
    """Arrays by the leaf's input names; in a plan, their shapes and dtypes"""
    masks: DividedMasks
    """The masks of all devices"""
    call: DividedCall


@dataclass(frozen=True)
class Way:
    """A way to divide the tokens of a leaf."""

    passed: str
    """What a device has of other devices during a call, in words; empty for nothing"""
    sends_values: bool
    """Whether the leaf's inputs are sent"""
    refusal: Callable[[Leaf, TokenOrder], str | None]
    """The reason why a leaf can not be divided like this; None if it can"""
    bytes_sent: Callable[[DividedPiece], dict[str, int]]
    """The bytes that a device sends in the forward pass, by array"""


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


def _bytes_around(piece: DividedPiece) -> dict[str, int]:
    """The bytes that a device sends to the next one in a ring."""
    counts, rank = piece.call.counts, piece.call.place
    tokens = sum(counts) - counts[(rank + 1) % len(counts)]
    return {name: tokens * _bytes(piece.inputs[name]) // counts[rank] for name in "kv"}


def _bytes_to_all(piece: DividedPiece) -> dict[str, int]:
    others = piece.call.devices - 1
    return {name: others * _bytes(piece.inputs[name]) for name in gathered_inputs(piece.leaf)}


def _bytes_of_blocks(piece: DividedPiece) -> dict[str, int]:
    """The bytes of a device's keys and solved values, which are float32 or wider."""
    times, v = piece.call.broadcasts * (piece.call.devices - 1), piece.inputs["v"]
    return {
        "k": times * _bytes(piece.inputs["k"]),
        "y": times * prod(v.shape) * max(v.dtype.itemsize, 4),
    }


def _bytes_of_scan(piece: DividedPiece) -> dict[str, int]:
    of_leaf = piece.call.states_of(piece.leaf, piece.inputs)
    return states.bytes_sent(piece.leaf, of_leaf, piece.call.place, piece.call.devices)


def _bytes(x: Array) -> int:
    return int(prod(x.shape) * x.dtype.itemsize)


LOCAL = Way("", False, _refusal_of_local, lambda piece: {})
RING = Way(
    "the keys of two other {devices} at a time", True, lambda leaf, order: None, _bytes_around
)
GATHERED = Way("the keys of all {devices}", True, _refusal_of_gathered, _bytes_to_all)
SOLVE = Way(
    "a block of solved values of another {device} at a time", True, solve.refusal, _bytes_of_blocks
)
STATES = Way("the states before them", False, states.refusal, _bytes_of_scan)

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


def during(call: DividedCall) -> str:
    """What a device has in memory during a call, in words."""
    ways = [way_of(leaf) for leaf in call.mechanism.program.leaves]
    passed = dict.fromkeys(way.passed for way in ways if way is not None and way.passed)
    device, devices = call.nouns
    others = ", ".join(passed).format(device=device, devices=devices) or "nothing of others"
    return f"{call.counts[call.place]} tokens of all heads, {others}"


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
        way, piece = piece_of(call, leaf_call, values, masks)
        if is_half:
            in_half = partial(_inputs_in_half, leaf_call, way, piece, inputs)
            piece = piece._replace(inputs=together(in_half))
        values[leaf_call.out] = output_of(number, way, piece)
    out = {program.out: cast(values[program.out], dtype)}
    return masks.without_padding(call.rank, out, {program.out: program.output})[program.out]


def piece_of(
    call: DividedCall, leaf_call: LeafCall, values: Mapping[str, Array], masks: DividedMasks
) -> tuple[Way, DividedPiece]:
    """A leaf call, and the way to divide it.

    `values` has the inputs, and the outputs of earlier leaf calls.
    """
    way, inputs = way_of(leaf_call.leaf), {name: values[v] for name, v in leaf_call.arguments}
    assert way is not None  # `refusal` has checked it.
    return way, DividedPiece(leaf_of(leaf_call), inputs, masks, call)


def bytes_sent(call: DividedCall) -> dict[str, int]:
    """The bytes that a device sends forward, by array and value of the program."""
    sent: dict[str, int] = {}
    values = dict(call.described)
    for leaf_call in call.mechanism.program.calls:
        way, piece = piece_of(call, leaf_call, values, DividedMasks())
        for name, count in way.bytes_sent(piece).items():
            sent[f"{name} for {leaf_call.out}"] = count
        values[leaf_call.out] = call.like_output(piece.leaf, piece.inputs)
    return sent


def output_shape(leaf: LeafProtocol, inputs: Mapping[str, Array]) -> Shape:
    """The shape of a leaf's output."""
    return Pattern.read(leaf.output).shape(leaf.inputs.sizes(str(leaf), shapes_of(inputs)))


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
