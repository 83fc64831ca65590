"""A leaf call: one leaf, applied to named values. A program is a list of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from precondattn.limits import KEPT_TEXTS

if TYPE_CHECKING:
    from precondattn.algebra.leaf_protocol import LeafProtocol


class LeafCall(NamedTuple):
    """One leaf, applied to named values."""

    out: str
    leaf: LeafProtocol
    arguments: tuple[tuple[str, str], ...]
    """(the leaf's name of an input, the name of the value)."""

    @property
    def reads(self) -> frozenset[str]:
        return frozenset([value for _, value in self.arguments])

    def slot_keys(self) -> Mapping[str, str]:
        """For each slot of the leaf, its key in the cache: the name of the value that it stores."""
        return _slot_keys(self)

    def __str__(self) -> str:
        arguments = [a if a == value else f"{a}={value}" for a, value in self.arguments]
        return f"{self.out} = {self.leaf}({', '.join(arguments)})"


@lru_cache(maxsize=KEPT_TEXTS)
def _slot_keys(call: LeafCall) -> Mapping[str, str]:
    names = {**dict(call.arguments), "out": call.out}
    return {slot.name: slot.holds.format(**names) for slot in call.leaf.slots()}
