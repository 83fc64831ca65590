"""The devices along an axis of a mesh, and the masks of their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from precondattn.parallel.layouts import TokenOrder
from precondattn.parallel.masks import DividedMasks


class DeviceLine(NamedTuple):
    """The devices along an axis of a mesh, and the order of their tokens, equally many on each."""

    axis: str
    devices: int
    order: TokenOrder

    @property
    def rank(self) -> Array:
        return lax.axis_index(self.axis)

    def positions(self, device: Array, tokens: int) -> Array:
        """The positions of a device's tokens in the sequence."""
        part, row = self.order.part_of(tokens), jnp.arange(tokens)
        return self.order.number_of(device, row // part, self.devices) * part + row % part

    def all_positions(self, tokens: int) -> Array:
        """The positions of every device's tokens in the sequence (devices, tokens)."""
        return self.positions(jnp.arange(self.devices)[:, None], tokens)

    def passed_on(self, arrays: tuple[Array, ...]) -> Array:
        """The arrays of the device before this one; every device sends its arrays to the next."""
        around = [(i, (i + 1) % self.devices) for i in range(self.devices)]
        return lax.ppermute(arrays, self.axis, around) if self.devices > 1 else arrays


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
