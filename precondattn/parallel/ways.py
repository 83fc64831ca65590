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

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from precondattn.algebra.declaration import Pattern
from precondattn.algebra.mechanism import Leaf, TokenWise, leaf_of
from precondattn.arrays import Array, DType, cast, upcast_all
from precondattn.dispatch.discovery import discover
from precondattn.parallel import solve, states
from precondattn.parallel.layouts import TokenOrder
from precondattn.parallel.ring_reads import goes_around
from precondattn.spec.linear_family import LinearFamily
from precondattn.spec.lucid import LucidSolve
from precondattn.spec.path import Path
from precondattn.spec.softmax import Softmax

if TYPE_CHECKING:
    from precondattn.algebra.leaf_protocol import LeafCall, LeafProtocol
    from precondattn.algebra.piece import BackendNames
    from precondattn.algebra.program import Program
    from precondattn.arrays import Shape


class PlannedPiece(Protocol):
    """A leaf call in a plan, from which the bytes that a device sends follow."""

    @property
    def leaf(self) -> Leaf: ...

    @property
    def inputs(self) -> dict[str, Array]:
        """Arrays, or their shapes and dtypes, by the leaf's input names"""

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of tokens of each device"""

    @property
    def place(self) -> int:
        """The device whose bytes are counted; the first one if all run one program"""

    @property
    def broadcasts(self) -> int:
        """The number of times that a broadcast array is sent"""

    def states(self) -> Mapping[str, Array]:
        """The leaf's empty states, or their shapes and dtypes"""


Piece = TypeVar("Piece", bound=PlannedPiece)


@dataclass(frozen=True)
class Way:
    """A way to divide the tokens of a leaf."""

    passed: str
    """What a device has of other devices during a call, in words; empty for nothing"""
    sends_values: bool
    """Whether the leaf's inputs are sent"""
    refusal: Callable[[Leaf, TokenOrder], str | None]
    """The reason why a leaf can not be divided like this; None if it can"""
    bytes_sent: Callable[[Any], dict[str, int]]
    """The bytes that a device sends in the forward pass, by array, from a `PlannedPiece`"""


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


def _bytes_around(piece: PlannedPiece) -> dict[str, int]:
    """The bytes that a device sends to the next one in a ring."""
    devices = len(piece.counts)
    tokens = sum(piece.counts[(piece.place - i) % devices] for i in range(devices - 1))
    return {name: tokens * _bytes(piece.inputs[name]) // piece.counts[piece.place] for name in "kv"}


def _bytes_to_all(piece: PlannedPiece) -> dict[str, int]:
    others = len(piece.counts) - 1
    return {name: others * _bytes(piece.inputs[name]) for name in gathered_inputs(piece.leaf)}


def _bytes_of_blocks(piece: PlannedPiece) -> dict[str, int]:
    """The bytes of a device's keys and solved values, which are float32 or wider."""
    times, v = piece.broadcasts * (len(piece.counts) - 1), piece.inputs["v"]
    return {
        "k": times * _bytes(piece.inputs["k"]),
        "y": times * prod(v.shape) * max(v.dtype.itemsize, 4),
    }


def _bytes_of_scan(piece: PlannedPiece) -> dict[str, int]:
    of_states, of_transitions = states.bytes_of_steps(piece.leaf, piece.states())
    transitions, count = states.tensors_sent(piece.place, len(piece.counts))
    return {"states": count * of_states, "transitions": transitions * of_transitions}


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


def refusal(program: Program, order: TokenOrder) -> str | None:
    """The reason why the tokens of a program can not be divided; None if they can."""
    for leaf in map(leaf_of, program.calls):
        way = way_of(leaf)
        if way is None:
            return f"has no way to divide the tokens of {leaf}"
        reason = way.refusal(leaf, order)
        if reason is not None:
            return reason
    return None


def during(program: Program, device: str, devices: str) -> str:
    """What a device has of others in memory during a call, in words."""
    ways = [way_of(leaf) for leaf in program.leaves]
    passed = dict.fromkeys(way.passed for way in ways if way is not None and way.passed)
    return ", ".join(passed).format(device=device, devices=devices) or "nothing of others"


def pieces(
    program: Program,
    values: Mapping[str, Array],
    piece_of: Callable[[Leaf, dict[str, Array]], Piece],
) -> Iterator[tuple[LeafCall, Way, Piece]]:
    """The leaf calls in order, with the ways to divide them.

    `values` has the inputs, and the outputs of earlier leaf calls.
    """
    for leaf_call in program.calls:
        inputs = {name: values[value] for name, value in leaf_call.arguments}
        way = way_of(leaf_call.leaf)
        assert way is not None  # `refusal` has checked it.
        yield leaf_call, way, piece_of(leaf_of(leaf_call), inputs)


def bytes_sent(
    program: Program,
    values: dict[str, Array],
    piece_of: Callable[[Leaf, dict[str, Array]], PlannedPiece],
    like_output: Callable[[LeafProtocol, Mapping[str, Array]], Array],
) -> dict[str, int]:
    """The bytes that a device sends forward, by array and value of the program."""
    sent: dict[str, int] = {}
    for leaf_call, way, piece in pieces(program, values, piece_of):
        for name, count in way.bytes_sent(piece).items():
            sent[f"{name} for {leaf_call.out}"] = count
        values[leaf_call.out] = like_output(piece.leaf, piece.inputs)
    return sent


def output_shape(leaf: LeafProtocol, inputs: Mapping[str, Array]) -> Shape:
    """The shape of a leaf's output."""
    shapes = {name: tuple(x.shape) for name, x in inputs.items()}
    return Pattern.read(leaf.output).shape(leaf.inputs.sizes(str(leaf), shapes))


def inputs_in_half(
    leaf_call: LeafCall,
    way: Way,
    inputs: Mapping[str, Array],
    of_call: Collection[str],
    dtype: DType,
    backend: BackendNames,
) -> dict[str, Array]:
    """The inputs of a leaf: in `dtype`, or in float32 if it sends none and its backends take that.

    `of_call` are the values of the program that are inputs of the call, and keep their dtype.
    """
    in_dtype = {
        name: inputs[name] if value in of_call else cast(inputs[name], dtype)
        for name, value in leaf_call.arguments
    }
    if way.sends_values:
        return in_dtype
    backends: Iterable[str] = leaf_of(leaf_call).explain(**in_dtype, backend=backend).backends
    is_wide = all(discover().named(name).wide_values for name in backends)
    return upcast_all(inputs) if is_wide else in_dtype
