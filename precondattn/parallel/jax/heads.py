"""The layout `heads` for the devices of JAX: tokens for heads, and back (`heads.py`)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from precondattn.parallel import heads
from precondattn.parallel.heads import HeadAxes
from precondattn.parallel.jax.call import (
    DividedArguments,
    DividedCall,
    output_axes,
    whole_masks,
)


def refusal(call: DividedCall) -> str | None:
    """The reason why this layout can not divide a call; None if it can."""
    return heads.refusal(call.mechanism, call.sizes, call.devices)


def check(call: DividedCall, arguments: DividedArguments, *, is_part: bool) -> None:
    """No check: each device's call of the mechanism checks all tokens of its heads."""


def output(call: DividedCall, arguments: DividedArguments) -> Array:
    """The output of a device's tokens, from its parts of the arguments."""
    of_heads = {name: _of_heads(x, call, call.axes[name]) for name, x in arguments.inputs.items()}
    out = call.mechanism(**of_heads, **whole_masks(call, arguments), backend=call.backend)
    axes = output_axes(call.mechanism)
    return lax.all_to_all(out, call.axis, axes.time, axes.heads, tiled=True)


def during(call: DividedCall) -> str:
    """What each device has in memory during the call, in words."""
    return heads.during(call.mechanism, call.sizes, call.devices)


def bytes_sent(call: DividedCall) -> dict[str, int]:
    """The bytes that each device sends in the forward pass: of each input, and of `out`."""
    whole = call.mechanism.program.output.shape(call.sizes)
    time = output_axes(call.mechanism).time
    out = tuple(n // call.devices if axis == time else n for axis, n in enumerate(whole))
    parts = {name: x for name, x in call.parts.items() if call.axes[name].time is not None}
    return heads.bytes_sent(call.mechanism.inputs, parts, out, whole, call.devices)


def _of_heads(x: Array, call: DividedCall, axes: HeadAxes) -> Array:
    """All tokens of this device's heads."""
    time, heads = axes
    if heads is None:
        return x if time is None else lax.all_gather(x, call.axis, axis=time, tiled=True)
    if x.shape[heads] < call.devices:
        # Each head goes to the devices that have its query heads.
        x = jnp.repeat(x, call.devices // x.shape[heads], axis=heads)
    if time is not None:
        return lax.all_to_all(x, call.axis, heads, time, tiled=True)
    count = x.shape[heads] // call.devices
    return lax.dynamic_slice_in_dim(x, lax.axis_index(call.axis) * count, count, heads)
