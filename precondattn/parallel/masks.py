"""Validity and segments of the tokens of every device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, cast

from precondattn.algebra.declaration import Inputs, Pattern
from precondattn.arrays import Array, Arrays, Device, namespace
from precondattn.execution.masks import zero_padding


class DividedMasks(NamedTuple):
    """Masks that have an entry for each device: (b, tokens of a device).

    Every device has the masks of all devices: they are small beside keys and values.
    """

    within: Array | None = None
    """Whether a token is within `lengths`, and so a valid query"""
    valid: Array | None = None
    """Whether a token is within `lengths` and not masked by `key_mask`, and so a valid key"""
    segment: Array | None = None

    def without_padding(
        self, device: Device, arrays: Mapping[str, Array], patterns: Mapping[str, Pattern]
    ) -> Arrays:
        """A device's arrays with 0 at padding, so that NaN there does not spread."""
        if self.valid is None:
            return dict(arrays)
        within = None if self.within is None else self.within[device]
        return zero_padding(arrays, cast(Inputs, patterns), within, self.valid[device])

    def of_extension(self, device: Device) -> Arrays:
        """The masks of a device's tokens, as arguments of an extension of states.

        A device's tokens are consecutive, so that the ones within `lengths` come first.
        """
        masks = self.of_rows(device)
        if self.valid is self.within:
            masks.pop("key_mask", None)
        if self.within is not None:
            within = self.within[device]
            xp = namespace(within)
            masks["lengths"] = xp.sum(within, axis=1, dtype=xp.int32)
        return masks

    def of_rows(self, device: Device, rows: slice | None = None) -> Arrays:
        """The masks of some rows of a device, or of all, as arguments of a call on these tokens."""
        masks = {"key_mask": self.valid, "segment_ids": self.segment}
        return {
            name: mask[device] if rows is None else mask[device][:, rows]
            for name, mask in masks.items()
            if mask is not None
        }


def crossing(run: Array, others: Array, at: int) -> tuple[Array, Array]:
    """Which tokens of two runs, one before the other, are of the one segment that both may have.

    Segments are contiguous. So it is the first segment of the first run if the other one comes
    before it (`at` is 0), and its last segment if it comes after it (`at` is −1).
    """
    facing = run[:, at : at + 1 or None]
    return run == facing, others == facing
