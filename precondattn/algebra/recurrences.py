"""Sets of recurrences, with which a backend declares what it computes.

A table of algorithms has classes of leaves and sets of recurrences as keys. A leaf is looked up by
its exact class, because a subclass may define other mathematics, and otherwise by its recurrence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.algebra.recurrence import (
    Erase,
    Gate,
    Keys,
    Normaliser,
    Reads,
    Recurrence,
    Rule,
    Strength,
)

K = TypeVar("K")
T = TypeVar("T")
Table = Mapping[Any, T]


@dataclass(frozen=True)
class Recurrences:
    """The set of all recurrences whose fields have listed values.

    If a field is not given, only its default value is in the set. A recurrence with a property that
    the author of an algorithm did not know is thus not in the set.

    Examples
    --------
    >>> from precondattn.algebra.recurrence import Recurrence
    >>> decayed = Recurrences(rule=("delta",), gate=(None, "head"), strength=("scalar",))
    >>> Recurrence("delta", gate="head", strength="scalar") in decayed
    True
    >>> decayed.lacks(Recurrence("delta", gate="channel", strength="scalar"))
    "rule='delta' is not computed with gate='channel'"
    """

    rule: tuple[Rule, ...] = ("add",)
    gate: tuple[Gate | None, ...] = (None,)
    keys: tuple[Keys, ...] = ("given",)
    erase: tuple[Erase, ...] = ("written key",)
    strength: tuple[Strength | None, ...] = (None,)
    several_steps: bool = False
    reads: tuple[Reads, ...] = ("after",)
    normaliser: tuple[Normaliser | None, ...] = (None,)

    def __contains__(self, recurrence: Recurrence) -> bool:
        return not any(self._missing(recurrence))

    def _missing(self, recurrence: Recurrence) -> Iterable[str]:
        if recurrence.steps is not None and not self.several_steps:
            yield "steps"
        for name in LISTED:
            if getattr(recurrence, name) not in getattr(self, name):
                yield name

    def lacks(self, recurrence: Recurrence) -> str | None:
        """The reason why a recurrence is not in the set; None if it is."""
        missing = [*self._missing(recurrence)]
        if "rule" in missing:
            return f"rule={recurrence.rule!r} is not computed"
        settings = " and ".join(f"{name}={getattr(recurrence, name)!r}" for name in missing)
        return f"rule={recurrence.rule!r} is not computed with {settings}" if missing else None


LISTED = [field.name for field in fields(Recurrences) if field.name != "several_steps"]


def is_in(leaf: LeafProtocol, key: type | Recurrences) -> bool:
    """Whether a leaf has this exact class, or one of these recurrences."""
    if isinstance(key, Recurrences):
        return leaf.recurrence is not None and leaf.recurrence in key
    return type(leaf) is key


def entry_of(table: Table[T], leaf: LeafProtocol) -> T | None:
    """The entry of a table for a leaf; None if there is none."""
    key = key_of(table, leaf)
    return None if key is None else table[key]


def key_of(table: Mapping[K, T], leaf: LeafProtocol) -> K | None:
    """The key of the table's entry for a leaf; None if there is none."""
    exact = cast("K", type(leaf))
    if exact in table:
        return exact
    return next((key for key in table if isinstance(key, Recurrences) and is_in(leaf, key)), None)


def lack_of(table: Table[object], leaf: LeafProtocol) -> str:
    """The reason why a table has no entry for a leaf, as the end of a sentence; may be empty."""
    recurrence = leaf.recurrence
    if recurrence is None:
        return ""
    reasons = [key.lacks(recurrence) or "" for key in table if isinstance(key, Recurrences)]
    with_rule = [reason for reason in reasons if " with " in reason]
    return "".join(f": {reason}" for reason in sorted(with_rule or reasons, key=len)[:1])
