"""The layouts that divide tokens: a device keeps its tokens, and each leaf is divided separately.

A leaf is divided in one of these ways, as in PyTorch (`torch/tokens.py`). Each is one program that
all devices run:

    local     leaves that compute each token alone, such as norms and feature maps (`local.py`)
    ring      softmax attention: keys and values go around a ring               (`ring.py`)
    gathered  PaTH, and softmax attention with a window, gate or sink: every device gathers all
              keys                                                              (`gathered.py`)
    solve     LUCID: solved blocks are broadcast                                (`solve.py`)
    scan      recurrences: a scan gives the state before a device's tokens      (`states.py`)

In half precision, values that are sent are in the call's dtype, and the others in float32
(`half_precision.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array, lax

from precondattn.algebra.declaration import Pattern
from precondattn.algebra.mechanism import Leaf, TokenWise, leaf_of
from precondattn.arrays import HALF, Arrays, cast
from precondattn.execution.arguments import check_call
from precondattn.execution.array_checks import call_dtype
from precondattn.execution.masks import (
    INTEGERS,
    ValueChecks,
    check_lengths,
    check_mask,
    is_contiguous,
    nan_where_invalid,
)
from precondattn.parallel.half_precision import inputs_in_half
from precondattn.parallel.jax import gathered, local, ring, solve, states
from precondattn.parallel.jax.call import MASKS, DividedArguments, DividedCall
from precondattn.parallel.jax.piece import DeviceLine, DividedMasks, DividedPiece
from precondattn.parallel.ring_reads import goes_around
from precondattn.parallel.states import SUMS
from precondattn.spec.linear_family import LinearFamily
from precondattn.spec.lucid import LucidSolve
from precondattn.spec.path import Path
from precondattn.spec.softmax import Softmax

if TYPE_CHECKING:
    from precondattn.algebra.leaf_protocol import LeafCall, LeafProtocol

WAYS: Mapping[type[Leaf], ModuleType] = {
    TokenWise: local,
    Softmax: ring,
    Path: gathered,
    LucidSolve: solve,
    LinearFamily: states,
    **dict.fromkeys(SUMS, states),
}


def refusal(call: DividedCall, masks: Collection[str]) -> str | None:
    """The reason why these layouts can not divide a call; None if they can."""
    assert call.order is not None  # Only `heads` has none.
    keys = call.sizes.get("s", call.tokens)
    if keys != call.tokens:
        return f"expects as many queries as keys; found {call.tokens} and {keys}"
    for leaf in call.mechanism.program.leaves:
        way = way_of(leaf)
        if way is None:
            return f"has no way to divide the tokens of {leaf}"
        reason: str | None = way.refusal(leaf, call.order, masks)
        if reason is not None:
            return reason
    return None


def check(call: DividedCall, given: DividedArguments, *, is_part: bool) -> None:
    """Raise an error for invalid arguments, be they whole or one device's parts.

    The entries of masks are checked if they are known. For traced masks, `output` gives NaN for an
    invalid sequence.
    """
    check_call(call.mechanism, (), given.inputs, {"backend": call.backend})
    like, b, tokens = next(iter(given.inputs.values())), call.sizes["b"], call.tokens
    shape = (b, tokens // call.devices if is_part else tokens)
    for name, dtypes in (("key_mask", ("bool",)), ("segment_ids", INTEGERS)):
        check_mask(call.owner, name, given.masks.get(name), like, shape, dtypes, "(b s)")
    if is_part:
        given = DividedArguments(
            given.inputs, {n: a for n, a in given.masks.items() if not MASKS[n]}
        )
    _invalid(call, given)


def output(call: DividedCall, given: DividedArguments) -> Array:
    """The output of a device's tokens, from its parts of the arguments."""
    whole = {
        name: mask if MASKS[name] is None else lax.all_gather(mask, call.axis, axis=1, tiled=True)
        for name, mask in given.masks.items()
    }
    line, program = _line(call), call.mechanism.program
    masks = DividedMasks.of_call(line, whole, call.tokens // call.devices)
    values = masks.without_padding(line.rank, given.inputs, call.mechanism.inputs)
    name = call_dtype(given.inputs)
    is_half, dtype = name in HALF, jnp.dtype(name)
    for leaf_call, way, piece in _pieces(call, masks, values):
        if is_half:
            of_leaf = leaf_call, piece.inputs, given.inputs, dtype, call.backend
            inputs = inputs_in_half(*of_leaf, sends_values=way.SENDS_VALUES)
            piece = piece._replace(inputs=inputs)
        values[leaf_call.out] = way.output(piece)
    out = {program.out: cast(values[program.out], dtype)}
    out = masks.without_padding(line.rank, out, {program.out: program.output})
    return nan_where_invalid(
        out[program.out], _invalid(call, DividedArguments(given.inputs, whole))
    )


def during(call: DividedCall) -> str:
    """What each device has in memory during the call, in words."""
    ways = [way_of(leaf) for leaf in call.mechanism.program.leaves]
    passed = dict.fromkeys(way.PASSED for way in ways if way is not None and way.PASSED)
    return f"its tokens of all heads, {', '.join(passed) or 'nothing of others'}"


def bytes_sent(call: DividedCall) -> dict[str, int]:
    """The bytes that each device sends forward, by array and value of the program."""
    sent: dict[str, int] = {}
    values: Arrays = dict(call.parts)
    for leaf_call, way, piece in _pieces(call, DividedMasks(None, None, None), values):
        for name, count in way.bytes_sent(piece).items():
            sent[f"{name} for {leaf_call.out}"] = count
        values[leaf_call.out] = _like_output(piece)
    return sent


def way_of(leaf: LeafProtocol) -> ModuleType | None:
    """The module that divides the tokens of a leaf; None if there is none."""
    way = next((way for kind, way in WAYS.items() if isinstance(leaf, kind)), None)
    return gathered if way is ring and not goes_around(leaf) else way


def _line(call: DividedCall) -> DeviceLine:
    assert call.order is not None  # Only `heads` has none.
    return DeviceLine(call.axis, call.devices, call.order)


def _invalid(call: DividedCall, given: DividedArguments) -> Array | None:
    """Which sequences (b,) have invalid entries in traced masks.

    Raises
    ------
    TypeError, ValueError
        for invalid entries that are known.
    """
    checks, masks = ValueChecks(call.owner), given.masks
    like, b, tokens = next(iter(given.inputs.values())), call.sizes["b"], call.tokens
    check_lengths(call.owner, masks.get("lengths"), like, b, tokens, "s", checks)
    if "segment_ids" in masks:
        position = _line(call).all_positions(tokens // call.devices).reshape(-1)
        ids = jnp.zeros_like(masks["segment_ids"]).at[:, position].set(masks["segment_ids"])
        message = "segment_ids must be contiguous: each id in one run of the sequence"
        checks.require(is_contiguous(ids), message)
    return checks.invalid


def _pieces(
    call: DividedCall, masks: DividedMasks, values: Mapping[str, Array]
) -> Iterator[tuple[LeafCall, ModuleType, DividedPiece]]:
    """The leaf calls in order, with the modules that divide them.

    `values` has the inputs, and the outputs of earlier leaf calls.
    """
    line = _line(call)
    for leaf_call in call.mechanism.program.calls:
        inputs = {name: values[value] for name, value in leaf_call.arguments}
        way = way_of(leaf_call.leaf)
        assert way is not None  # `refusal` has checked it.
        yield leaf_call, way, DividedPiece(leaf_of(leaf_call), inputs, masks, line, call.backend)


def _like_output(piece: DividedPiece) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a leaf's output."""
    leaf, inputs = piece.leaf, piece.inputs
    shapes = {name: tuple(x.shape) for name, x in inputs.items()}
    shape = Pattern.read(leaf.output).shape(leaf.inputs.sizes(str(leaf), shapes))
    return jax.ShapeDtypeStruct(shape, jnp.dtype(call_dtype(inputs)))
