"""The layout `heads` for the devices of JAX: tokens for heads, and back (`heads.py`)."""

from __future__ import annotations

from collections.abc import Collection

import jax.numpy as jnp
from jax import Array, lax

from precondattn.parallel.heads import HeadAxes, elements_sent, heads_of_output
from precondattn.parallel.heads import refusal as refusal_of_heads
from precondattn.parallel.jax.call import MASKS, DividedArguments, DividedCall, output_axes


def refusal(call: DividedCall, masks: Collection[str]) -> str | None:
    """The reason why this layout can not divide a call; None if it can."""
    return refusal_of_heads(call.mechanism, call.sizes, call.devices)


def check(call: DividedCall, given: DividedArguments, *, is_part: bool) -> None:
    """No check: each device's call of the mechanism checks all tokens of its heads."""


def output(call: DividedCall, given: DividedArguments) -> Array:
    """The output of a device's tokens, from its parts of the arguments."""
    of_heads = {name: _of_heads(x, call, call.axes[name]) for name, x in given.inputs.items()}
    whole = {
        name: mask if MASKS[name] is None else lax.all_gather(mask, call.axis, axis=1, tiled=True)
        for name, mask in given.masks.items()
    }
    out = call.mechanism(**of_heads, **whole, backend=call.backend)
    time, heads = output_axes(call.mechanism)
    return lax.all_to_all(out, call.axis, time, heads, tiled=True)


def during(call: DividedCall) -> str:
    """What each device has in memory during the call, in words."""
    count = call.sizes[heads_of_output(call.mechanism)] // call.devices
    return f"all tokens of {count} heads"


def bytes_sent(call: DividedCall) -> dict[str, int]:
    """The bytes that each device sends in the forward pass: of each input, and of `out`."""
    of_out = call.mechanism.program.output
    whole = of_out.shape(call.sizes)
    time = output_axes(call.mechanism).time
    out = tuple(n // call.devices if axis == time else n for axis, n in enumerate(whole))
    parts = {name: x for name, x in call.parts.items() if call.axes[name].time is not None}
    shapes = {name: x.shape for name, x in parts.items()}
    elements = elements_sent(call.mechanism.inputs, shapes, out, whole, call.devices)
    widths = {name: x.dtype.itemsize for name, x in parts.items()}
    widths["out"] = widths.get("v", next(iter(widths.values())))
    return {name: count * widths[name] for name, count in elements.items()}


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
