"""Softmax attention in which every device gathers all keys: PaTH, windows, gates and sinks.

As in `torch/gathered.py`, each part of a device's queries is the end of a call on all tokens up to
its last one. Their number depends on the device, but shapes in one program can not. So the keys are
rolled until these tokens come last, and the later tokens, which are now in front, are masked. Every
device therefore processes as many keys as the last one needs, in every layout.

The gradient of a key is the sum over all devices, which is the transpose of the gathering.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from precondattn.parallel.ways import DividedPiece, gathered_inputs


def output(piece: DividedPiece) -> Array:
    """The output of a device's tokens."""
    line, inputs, tokens = piece.call.line, piece.inputs, piece.call.counts[0]
    whole = {
        name: _in_order(piece, lax.all_gather(inputs[name], line.axis, axis=1, tiled=True))
        for name in gathered_inputs(piece.leaf)
    }
    of_devices = {"key_mask": piece.masks.valid, "segment_ids": piece.masks.segment}
    masks = {n: _mask_in_order(piece, of) for n, of in of_devices.items() if of is not None}
    size = line.order.part_of(tokens)

    def of_part(part: Array) -> Array:
        number = line.order.number_of(line.rank, part, line.devices)
        return _of_part(piece, whole, masks, part * size, (number + 1) * size, size)

    outs = lax.map(of_part, jnp.arange(tokens // size))  # (parts, b, size, …)
    outs = jnp.moveaxis(outs, 0, 1)
    return jnp.reshape(outs, (outs.shape[0], tokens, *outs.shape[3:]))


def _in_order(piece: DividedPiece, x: Array) -> Array:
    """Tokens (b, s, …) in the order of the sequence, gathered from all devices."""
    position = piece.call.line.all_positions(x.shape[1] // piece.call.line.devices)
    return x[:, jnp.argsort(jnp.reshape(position, -1))]


def _of_part(
    piece: DividedPiece,
    whole: dict[str, Array],
    masks: dict[str, Array],
    first_row: Array,
    end: Array,
    size: int,
) -> Array:
    """The output of consecutive queries: the last ones of a call on all tokens up to them."""
    leaf = piece.leaf
    inputs = {}
    for name, x in piece.inputs.items():
        if name in whole:
            inputs[name] = jnp.roll(whole[name], -end, axis=1)
        elif "t" in leaf.inputs[name].letters:
            inputs[name] = lax.dynamic_slice_in_dim(x, first_row, size, axis=1)
        else:
            inputs[name] = x

    b, s = next(iter(whole.values())).shape[:2]
    is_before = jnp.broadcast_to(jnp.arange(s) >= s - end, (b, s))
    options = {"key_mask": is_before}
    if "key_mask" in masks:
        options["key_mask"] &= jnp.roll(masks["key_mask"], -end, axis=1)
    if "segment_ids" in masks:
        ids = masks["segment_ids"]
        # Masked tokens join the first segment, so that each segment stays contiguous.
        options["segment_ids"] = jnp.where(is_before, jnp.roll(ids, -end, axis=1), ids[:, :1])
    return leaf(**inputs, **options, backend=piece.call.backend)


def _mask_in_order(piece: DividedPiece, of_devices: Array) -> Array:
    """A mask (b, s) from that of every device (devices, b, tokens)."""
    moved = jnp.moveaxis(of_devices, 0, 1)
    return _in_order(piece, jnp.reshape(moved, (moved.shape[0], -1)))
