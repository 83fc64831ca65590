"""The layout `heads` for the devices of JAX: tokens for heads, and back (`heads.py`)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from precondattn.parallel.heads import HeadAxes
from precondattn.parallel.jax.call import (
    DividedArguments,
    DividedCall,
    output_axes,
    whole_masks,
)


def output(call: DividedCall, arguments: DividedArguments) -> Array:
    """The output of a device's tokens, from its parts of the arguments."""
    of_heads = {name: _of_heads(x, call, call.axes[name]) for name, x in arguments.inputs.items()}
    out = call.mechanism(**of_heads, **whole_masks(call, arguments), backend=call.backend)
    axes = output_axes(call.mechanism)
    return lax.all_to_all(out, call.axis, axes.time, axes.heads, tiled=True)


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
