"""The layouts that divide tokens: a device keeps its tokens, and each leaf is divided separately.

`precondattn/parallel/ways.py` lists the ways to divide a leaf. Each is one program that all devices
run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

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
from precondattn.parallel import ways
from precondattn.parallel.jax import gathered, ring, solve, states
from precondattn.parallel.jax.call import MASKS, DividedArguments, DividedCall, whole_masks
from precondattn.parallel.jax.piece import DeviceLine, DividedPiece, masks_of
from precondattn.parallel.masks import DividedMasks
from precondattn.parallel.ways import Way

if TYPE_CHECKING:
    from precondattn.algebra.leaf_protocol import LeafProtocol
    from precondattn.algebra.mechanism import Leaf


def _alone(piece: DividedPiece) -> Array:
    """The output of a device's tokens, each of which is computed alone."""
    out: Array = piece.leaf(**piece.inputs, backend=piece.backend)
    return out


OUTPUTS: Mapping[Way, Callable[[DividedPiece], Array]] = {
    ways.LOCAL: _alone,
    ways.RING: ring.output,
    ways.GATHERED: gathered.output,
    ways.SOLVE: solve.output,
    ways.STATES: states.output,
}


def refusal(call: DividedCall) -> str | None:
    """The reason why these layouts can not divide a call; None if they can."""
    assert call.order is not None  # Only `heads` has none.
    keys = call.sizes.get("s", call.tokens)
    if keys != call.tokens:
        return f"expects as many queries as keys; found {call.tokens} and {keys}"
    if "segment_ids" in call.masks and call.order.name != "contiguous":
        for leaf in call.mechanism.program.leaves:
            if ways.way_of(leaf) is ways.RING and not leaf.offers.causal:
                return f"does not support segment_ids of {leaf}"
    return ways.refusal(call.mechanism.program, call.order)


def check(call: DividedCall, arguments: DividedArguments, *, is_part: bool) -> None:
    """Raise an error for invalid arguments, be they whole or one device's parts.

    The entries of masks are checked if they are known. For traced masks, `output` gives NaN for an
    invalid sequence.
    """
    check_call(call.mechanism, (), arguments.inputs, {"backend": call.backend})
    like, b, tokens = next(iter(arguments.inputs.values())), call.sizes["b"], call.tokens
    shape = (b, tokens // call.devices if is_part else tokens)
    for name, dtypes in (("key_mask", ("bool",)), ("segment_ids", INTEGERS)):
        check_mask(call.owner, name, arguments.masks.get(name), like, shape, dtypes, "(b s)")
    masks = arguments.masks
    _invalid(call, like, {n: a for n, a in masks.items() if not (is_part and MASKS[n])})


def output(call: DividedCall, arguments: DividedArguments) -> Array:
    """The output of a device's tokens, from its parts of the arguments."""
    inputs, whole = arguments.inputs, whole_masks(call, arguments)
    line, program = _line(call), call.mechanism.program
    masks = masks_of(line, whole, call.tokens // call.devices)
    values = masks.without_padding(line.rank, inputs, call.mechanism.inputs)
    name = call_dtype(inputs)
    dtype = jnp.dtype(name)
    for leaf_call, way, piece in ways.pieces(program, values, partial(_piece, call, masks)):
        if name in HALF:
            of_leaf = leaf_call, way, piece.inputs, inputs, dtype, call.backend
            piece = piece._replace(inputs=ways.inputs_in_half(*of_leaf))
        values[leaf_call.out] = OUTPUTS[way](piece)
    out = {program.out: cast(values[program.out], dtype)}
    out = masks.without_padding(line.rank, out, {program.out: program.output})
    like = next(iter(inputs.values()))
    return nan_where_invalid(out[program.out], _invalid(call, like, whole))


def during(call: DividedCall) -> str:
    """What each device has in memory during the call, in words."""
    return f"its tokens of all heads, {ways.during(call.mechanism.program, 'device', 'devices')}"


def bytes_sent(call: DividedCall) -> dict[str, int]:
    """The bytes that each device sends forward, by array and value of the program."""
    piece_of, values = partial(_piece, call, DividedMasks()), dict(call.parts)
    return ways.bytes_sent(call.mechanism.program, values, piece_of, _like_output)


def _line(call: DividedCall) -> DeviceLine:
    assert call.order is not None  # Only `heads` has none.
    return DeviceLine(call.axis, call.devices, call.order)


def _piece(
    call: DividedCall, masks: DividedMasks, leaf: Leaf, inputs: dict[str, Array]
) -> DividedPiece:
    tokens = call.tokens // call.devices
    return DividedPiece(leaf, tokens, inputs, masks, _line(call), call.backend)


def _invalid(call: DividedCall, like: Array, masks: Arrays) -> Array | None:
    """Which sequences (b,) have invalid entries in traced masks; an error for known entries."""
    checks, b, tokens = ValueChecks(call.owner), call.sizes["b"], call.tokens
    check_lengths(call.owner, masks.get("lengths"), like, b, tokens, "s", checks)
    if "segment_ids" in masks:
        position = _line(call).all_positions(tokens // call.devices).reshape(-1)
        ids = jnp.zeros_like(masks["segment_ids"]).at[:, position].set(masks["segment_ids"])
        message = "segment_ids must be contiguous: each id in one run of the sequence"
        checks.require(is_contiguous(ids), message)
    return checks.invalid


def _like_output(leaf: LeafProtocol, inputs: Mapping[str, Array]) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a leaf's output."""
    return jax.ShapeDtypeStruct(ways.output_shape(leaf, inputs), jnp.dtype(call_dtype(inputs)))
