"""A call as all layouts receive it: its arguments by name, and the devices that take part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from precondattn.algebra.declaration import Pattern
from precondattn.algebra.mechanism import Mechanism
from precondattn.algebra.piece import BackendNames
from precondattn.arrays import Arrays, library_of
from precondattn.execution.input_names import CALL_OPTIONS, inputs_by_name
from precondattn.execution.pair_masks import refuse_divided
from precondattn.parallel.heads import HeadAxes
from precondattn.parallel.layouts import TokenOrder
from precondattn.parallel.ways import RING, way_of

MASKS = {"lengths": None, "key_mask": 1, "segment_ids": 1}
"""The axis of a mask's tokens."""


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


class DividedArguments(NamedTuple):
    """The arguments of a call by name: whole arrays, or one device's parts of them."""

    inputs: dict[str, Array]
    masks: dict[str, Array]


@dataclass(frozen=True)
class DividedCall:
    """A call whose arguments have been checked."""

    owner: str
    """The name of the call in errors"""
    mechanism: Mechanism
    axis: str
    devices: int
    order: TokenOrder | None
    """The order of the tokens; None in the layout `heads`"""
    backend: BackendNames
    axes: Mapping[str, HeadAxes]
    """The time and head axes of each input"""
    sizes: Mapping[str, int]
    """The size of each dimension letter, with all tokens"""
    masks: tuple[str, ...]
    """The names of the masks"""

    @property
    def rank(self) -> Array:
        return lax.axis_index(self.axis)

    @property
    def line(self) -> DeviceLine:
        assert self.order is not None  # Only `heads` has none.
        return DeviceLine(self.axis, self.devices, self.order)

    @property
    def tokens(self) -> int:
        """The number of all queries, or of all keys if the mechanism has no queries."""
        return self.sizes["t" if "t" in self.sizes else "s"]

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of tokens of each device."""
        return (self.tokens // self.devices,) * self.devices

    def refusal_of_tokens(self) -> str | None:
        """The reason why the tokens can not be divided; None if they can."""
        assert self.order is not None  # Only `heads` has none.
        keys = self.sizes.get("s", self.tokens)
        if keys != self.tokens:
            return f"expects as many queries as keys; found {self.tokens} and {keys}"
        if "segment_ids" in self.masks and self.order.name != "contiguous":
            for leaf in self.mechanism.program.leaves:
                if way_of(leaf) is RING and not leaf.offers.causal:
                    return f"does not support segment_ids of {leaf}"
        return None


def output_axes(mechanism: Mechanism) -> HeadAxes:
    """The time and head axes of the output; the head axis also if there is one head."""
    pattern: Pattern = mechanism.program.output
    return HeadAxes.of_pattern(pattern, (2,) * len(pattern.axes))


def whole_masks(call: DividedCall, arguments: DividedArguments) -> dict[str, Array]:
    """The masks of all tokens, gathered from every device's parts."""
    return {
        name: mask if MASKS[name] is None else lax.all_gather(mask, call.axis, axis=1, tiled=True)
        for name, mask in arguments.masks.items()
    }


def arguments_of(
    mechanism: Mechanism, owner: str, arrays: tuple[Array, ...], named: Arrays
) -> DividedArguments:
    """The arguments by name; a TypeError names one that is not supported."""
    masks = {name: named.pop(name) for name in MASKS if name in named}
    masks = {name: jnp.asarray(mask) for name, mask in masks.items() if mask is not None}
    if named.pop("cu_seqlens", None) is not None:
        raise TypeError(f"{owner}: cu_seqlens are not supported; give segment_ids")
    refuse_divided(owner, named)
    inputs = inputs_by_name(str(mechanism), mechanism.inputs, arrays, named, CALL_OPTIONS)
    for name, x in inputs.items():
        if library_of(x) != "jax":
            raise TypeError(f"{owner}: {name} must be an array of JAX; found {type(x).__name__}")
    return DividedArguments(inputs, masks)
