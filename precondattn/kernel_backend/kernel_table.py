"""The table of a backend: which class computes which leaf or group, imported when it is needed.

A table maps the exact class of a leaf, or the exact classes of a group's leaves in order, to
`"module:Class"`. Subclasses are not in it: they may define other mathematics. Where the class
depends on one option of the leaf, the entry is a `ByOption`. All other options are compared by the
class itself, in its method `refuses`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class ByOption:
    """An entry of a table that depends on one option of the leaf."""

    option: str
    classes: Mapping[Any, str]
    """`"module:Class"` by the option's value."""
    otherwise: str | None = None
    """For every other value; None declines them."""

    def entry(self, leaf: Any) -> str | None:
        return self.classes.get(getattr(leaf, self.option), self.otherwise)


KernelTable = Mapping[type | tuple[type, ...], str | ByOption]


def entry_in(table: KernelTable, mechanism: Any) -> str | None:
    """`"module:Class"` of a leaf or group; None where the table has none."""
    leaves = tuple(map(type, mechanism.program.leaves))
    entry = table.get(type(mechanism) if len(leaves) == 1 else leaves)
    return entry.entry(mechanism) if isinstance(entry, ByOption) else entry


def kernels_in(table: KernelTable, mechanism: Any) -> Any:
    """The class for a leaf or group; None where the table has none."""
    entry = entry_in(table, mechanism)
    return None if entry is None else _imported(entry)


@cache
def _imported(entry: str) -> Any:
    module, _, name = entry.partition(":")
    return getattr(import_module(module), name)
