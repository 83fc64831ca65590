"""The table of a kernel backend, which maps leaves and groups to classes of kernels.

A key is the exact class of a leaf, or a set of recurrences, or for a group a tuple of these in the
order of its leaves. An entry is `"module:Class"`, which is imported when it is needed, or a
`ByOption`. The class checks all other options, in its method `refuses`.
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
    """An entry of the table that depends on one option of the leaf."""

    option: str
    classes: Mapping[object, str]
    """The entry `"module:Class"` for each value of the option."""
    otherwise: str | None = None
    """The entry for all other values; None declines them."""


OneLeaf = type | Recurrences
Kernels = Any

KernelTable = Mapping[OneLeaf | tuple[OneLeaf, ...], str | ByOption]


def entry_in(table: KernelTable, mechanism: Piece) -> str | None:
    """The entry `"module:Class"` for a leaf or group; None if the table has none."""
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
    """The end of a sentence that says why a table has no class for a leaf; empty for a group."""
    leaves = mechanism.program.leaves
    return lack_of(table, leaves[0]) if len(leaves) == 1 else ""


def kernels_in(table: KernelTable, mechanism: Piece) -> type[Kernels] | None:
    """The class of kernels for a leaf or group; None if the table has none."""
    entry = entry_in(table, mechanism)
    return None if entry is None else resolve_name(entry)


def recurrences_in(table: KernelTable) -> list[Stateful]:
    """The leaves with a state, with default options, that a table has kernels for."""
    classes = [each for _, each in sorted(registered().items()) if issubclass(each, Stateful)]
    return [leaf for leaf in (each() for each in classes) if entry_in(table, leaf) is not None]
