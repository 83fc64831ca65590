"""The table of a backend: which class computes which leaf or group, imported when it is needed.

A table maps a leaf, as its exact class or as the recurrences that it may have, to `"module:Class"`,
and a group as those of its leaves in order. Where the class depends on one option of the leaf, the
entry is a `ByOption`. All other options are compared by the class itself, in its method `refuses`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.algebra.piece import Piece
from precondattn.algebra.recurrences import Recurrences, entry_of, is_in, lack_of
from precondattn.algebra.registry import registered
from precondattn.spec.stateful import Stateful


@dataclass(frozen=True)
class ByOption:
    """An entry of a table that depends on one option of the leaf."""

    option: str
    classes: Mapping[object, str]
    """`"module:Class"` by the option's value."""
    otherwise: str | None = None
    """For every other value; None declines them."""


OneLeaf = type | Recurrences
Kernels = Any
"""An object with `refuses`, and those methods of a backend that its kernels have."""

KernelTable = Mapping[OneLeaf | tuple[OneLeaf, ...], str | ByOption]


def entry_in(table: KernelTable, mechanism: Piece) -> str | None:
    """`"module:Class"` of a leaf or group; None where the table has none."""
    leaves = mechanism.program.leaves
    if len(leaves) == 1:
        entry = entry_of(table, leaves[0])
    else:
        entry = next((e for key, e in table.items() if _is_group(key, leaves)), None)
    if isinstance(entry, ByOption):
        return entry.classes.get(getattr(mechanism, entry.option), entry.otherwise)
    return entry


def _is_group(key: OneLeaf | tuple[OneLeaf, ...], leaves: tuple[LeafProtocol, ...]) -> bool:
    return isinstance(key, tuple) and len(key) == len(leaves) and all(map(is_in, leaves, key))


def lack_in(table: KernelTable, mechanism: Piece) -> str:
    """Why a table has no class for a leaf, as the end of a sentence; empty for a group."""
    leaves = mechanism.program.leaves
    return lack_of(table, leaves[0]) if len(leaves) == 1 else ""


def kernels_in(table: KernelTable, mechanism: Piece) -> type[Kernels] | None:
    """The class for a leaf or group; None where the table has none."""
    entry = entry_in(table, mechanism)
    return None if entry is None else resolve_name(entry)


def recurrences_in(table: KernelTable) -> list[Stateful]:
    """The leaves with a state, with their default options, that a table has kernels for."""
    classes = [each for _, each in sorted(registered().items()) if issubclass(each, Stateful)]
    return [leaf for leaf in (each() for each in classes) if entry_in(table, leaf) is not None]
