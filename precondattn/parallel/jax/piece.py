"""One leaf call of a divided call, in the program that every device of JAX runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, cast

import jax.numpy as jnp
from jax import Array, lax

from precondattn.algebra.declaration import Inputs, Pattern
from precondattn.execution.masks import zero_padding
from precondattn.parallel.layouts import TokenOrder

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Leaf
    from precondattn.algebra.piece import BackendNames


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


class DividedMasks(NamedTuple):
    """Validity and segments of the tokens of every device (devices, b, tokens).

    Every device has the masks of all devices: they are small beside keys and values.
    """

    within: Array | None
    """Whether a token is within `lengths`, and so a valid query"""
    valid: Array | None
    """Whether a token is within `lengths` and not masked by `key_mask`, and so a valid key"""
    segment: Array | None

    @classmethod
    def of_call(cls, line: DeviceLine, given: Mapping[str, Array], tokens: int) -> DividedMasks:
        """The masks of a call, from whole masks whose tokens are in the order of the devices."""

        def of_devices(mask: Array) -> Array:
            return jnp.moveaxis(jnp.reshape(mask, (-1, line.devices, tokens)), 1, 0)

        within = valid = segment = None
        if "key_mask" in given:
            valid = of_devices(given["key_mask"])
        if "lengths" in given:
            within = line.all_positions(tokens)[:, None] < given["lengths"][:, None]
            valid = within if valid is None else valid & within
        if "segment_ids" in given:
            segment = of_devices(given["segment_ids"])
        return cls(within, valid, segment)

    def without_padding(
        self, device: Array, arrays: Mapping[str, Array], patterns: Mapping[str, Pattern]
    ) -> dict[str, Array]:
        """A device's arrays with 0 at padding, so that NaN there does not spread."""
        if self.valid is None:
            return dict(arrays)
        within = None if self.within is None else self.within[device]
        return zero_padding(arrays, cast(Inputs, patterns), within, self.valid[device])

    def of_extension(self, device: Array) -> dict[str, Array]:
        """The masks of a device's tokens, as arguments of an extension of states.

        A device's tokens are consecutive, so that the ones within `lengths` come first.
        """
        masks = {}
        if self.within is not None:
            masks["lengths"] = jnp.sum(self.within[device], axis=1, dtype=jnp.int32)
        if self.valid is not None and self.valid is not self.within:
            masks["key_mask"] = self.valid[device]
        if self.segment is not None:
            masks["segment_ids"] = self.segment[device]
        return masks

    def of_device(self, device: Array) -> dict[str, Array]:
        """The masks of a device's tokens, as arguments of a full call on these tokens."""
        masks = {}
        if self.valid is not None:
            masks["key_mask"] = self.valid[device]
        if self.segment is not None:
            masks["segment_ids"] = self.segment[device]
        return masks


class DividedPiece(NamedTuple):
    """A leaf call whose tokens are divided."""

    leaf: Leaf
    inputs: dict[str, Array]
    """Arrays by the leaf's input names; in a plan, their shapes and dtypes"""
    masks: DividedMasks
    line: DeviceLine
    backend: BackendNames
