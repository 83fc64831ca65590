"""The layouts that divide tokens: a device keeps its tokens, and each leaf is divided separately.

`precondattn/parallel/ways.py` lists the ways to divide a leaf. Each is one program that all devices
run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jax import Array

from precondattn.arrays import Arrays
from precondattn.execution.arguments import check_call
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
from precondattn.parallel.jax.call import (
    MASKS,
    DeviceLine,
    DividedArguments,
    DividedCall,
    whole_masks,
)
from precondattn.parallel.masks import DividedMasks
from precondattn.parallel.ways import DividedPiece, Way


def _alone(piece: DividedPiece) -> Array:
    """The output of a device's tokens, each of which is computed alone."""
    return piece.leaf(**piece.inputs, backend=piece.call.backend)


OUTPUTS: Mapping[Way, Callable[[DividedPiece], Array]] = {
    ways.LOCAL: _alone,
    ways.RING: ring.output,
    ways.GATHERED: gathered.output,
    ways.SOLVE: solve.output,
    ways.STATES: states.output,
}


def check(call: DividedCall, arguments: DividedArguments, *, is_part: bool) -> None:
    """Raise an error for invalid arguments, be they whole or one device's parts.

    The entries of masks are checked if they are known. For traced masks, `output` gives NaN for an
    invalid sequence.
    """
    check_call(call.mechanism, (), arguments.inputs, {"backend": call.backend})
    like, b, tokens = next(iter(arguments.inputs.values())), call.sizes["b"], call.tokens
    shape = (b, call.counts[0] if is_part else tokens)
    for name, dtypes in (("key_mask", ("bool",)), ("segment_ids", INTEGERS)):
        check_mask(call.owner, name, arguments.masks.get(name), like, shape, dtypes, "(b s)")
    masks = arguments.masks
    _invalid(call, like, {n: a for n, a in masks.items() if not (is_part and MASKS[n])})


def output(call: DividedCall, arguments: DividedArguments) -> Array:
    """The output of a device's tokens, from its parts of the arguments."""
    inputs, whole = arguments.inputs, whole_masks(call, arguments)
    masks = masks_of(call.line, whole, call.counts[0])
    out = ways.computed(call, inputs, masks, lambda number, way, piece: OUTPUTS[way](piece))
    return nan_where_invalid(out, _invalid(call, next(iter(inputs.values())), whole))


def _invalid(call: DividedCall, like: Array, masks: Arrays) -> Array | None:
    """Which sequences (b,) have invalid entries in traced masks; an error for known entries."""
    checks, b, tokens = ValueChecks(call.owner), call.sizes["b"], call.tokens
    check_lengths(call.owner, masks.get("lengths"), like, b, tokens, "s", checks)
    if "segment_ids" in masks:
        position = call.line.all_positions(call.counts[0]).reshape(-1)
        ids = jnp.zeros_like(masks["segment_ids"]).at[:, position].set(masks["segment_ids"])
        message = "segment_ids must be contiguous: each id in one run of the sequence"
        checks.require(is_contiguous(ids), message)
    return checks.invalid


def masks_of(line: DeviceLine, arguments: Mapping[str, Array], tokens: int) -> DividedMasks:
    """The masks of a call, from whole masks whose tokens are in the order of the devices."""

    def of_devices(name: str) -> Array | None:
        if name not in arguments:
            return None
        return jnp.moveaxis(jnp.reshape(arguments[name], (-1, line.devices, tokens)), 1, 0)

    within, valid = None, of_devices("key_mask")
    if "lengths" in arguments:
        within = line.all_positions(tokens)[:, None] < arguments["lengths"][:, None]
        valid = within if valid is None else valid & within
    return DividedMasks(within, valid, of_devices("segment_ids"))
