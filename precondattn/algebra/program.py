"""Programs: the unfolded form of mechanisms, which is a list of leaf calls.

`lucid(laser)` is

    y = lucid_solve(k, v); out = softmax[read=log_mean_exp](q, k, v=y)

Every value has one name and is computed once. Equal leaf calls on the same values are one call.
Output, gradient, cache, declared inputs and the choice of backends are all derived from the
program. Mechanisms with equal programs run the same kernels, whatever their expressions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from hashlib import sha256

from precondattn.algebra.axes import letters_of
from precondattn.algebra.declaration import Pattern
from precondattn.algebra.leaf_protocol import LeafCall, LeafProtocol
from precondattn.cache import Slot

LONGEST_USE = 2000


class Program:
    """Leaf calls in order, and the name `out` of the result. Hashable by its text."""

    def __init__(
        self, calls: Iterable[LeafCall], out: str, meanings: Mapping[str, object] | None = None
    ) -> None:
        self.calls, self.out = tuple(calls), out
        patterns, self.axes = letters_of(self.calls)
        outputs = {call.out for call in self.calls}
        used = dict.fromkeys([value for call in self.calls for _, value in call.arguments])
        self.inputs = {value: patterns[value] for value in used if value not in outputs}
        """The pattern of each input, in order of first use."""
        self.output = patterns[out]
        """The pattern of the result."""
        self.meanings = dict(meanings or dict.fromkeys(self.inputs, "given"))
        """The meaning of each input."""

    @cached_property
    def text(self) -> str:
        return "; ".join(map(str, self.calls))

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<program {self.text}>"

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        # Leaves are compared, because different classes may have the same text.
        if self is other:
            return True
        return isinstance(other, Program) and (self.calls, self.out) == (other.calls, other.out)

    @cached_property
    def slot_keys(self) -> tuple[Mapping[str, str], ...]:
        """The keys in the cache of each leaf call's slots."""
        return tuple(call.slot_keys() for call in self.calls)

    @cached_property
    def slots(self) -> dict[str, tuple[Slot, Pattern]]:
        """The cache's buffers by name: slot, and pattern in the program's letters."""
        slots: dict[str, tuple[Slot, Pattern]] = {}
        for call, keys, axes in zip(self.calls, self.slot_keys, self.axes, strict=True):
            for slot in call.leaf.slots():
                pattern = Pattern.read(slot.pattern).substituted(axes)
                slots.setdefault(keys[slot.name], (slot, pattern))
        return slots

    @cached_property
    def reach(self) -> int | None:
        """The number of last cached tokens that a new token reads; None for all of them."""
        reaches = [
            call.leaf.reach
            for call in self.calls
            if any(slot.kind.has_tokens for slot in call.leaf.slots())
        ]
        finite = [reach for reach in reaches if reach is not None]
        return max(finite) if finite and len(finite) == len(reaches) else None

    @cached_property
    def readers(self) -> dict[str, frozenset[int]]:
        """The indices of the leaf calls that read each value."""
        readers: dict[str, frozenset[int]] = {}
        for number, call in enumerate(self.calls):
            for value in call.reads:
                readers[value] = readers.get(value, frozenset()) | {number}
        return readers

    @cached_property
    def reversed_values(self) -> frozenset[str]:
        """The values whose tokens are in reversed order, and those computed from them."""
        found = set[str]()
        for call in self.calls:
            if call.leaf.reverses_tokens != bool(found & call.reads):
                found.add(call.out)
        return frozenset(found)

    @property
    def leaves(self) -> tuple[LeafProtocol, ...]:
        return tuple([call.leaf for call in self.calls])

    def part(self, chosen: Iterable[int]) -> tuple[Program, dict[str, str]]:
        """The chosen leaf calls as a program, and its name for each value of this program.

        The names in a part do not depend on this program: an input has the name that the first
        leaf that reads it has for it, values computed inside are y1, y2 …, and the result is out.
        """
        calls = _canonical_order([self.calls[i] for i in sorted(chosen)])
        names: dict[str, str] = {}
        outputs = {call.out for call in calls}
        for call in calls:
            for formal, value in call.arguments:
                if value in outputs or value in names:
                    continue
                name, number = formal, 1
                while name in names.values():
                    number += 1
                    name = f"{formal}{number}"
                names[value] = name
        for i, call in enumerate(calls):
            names[call.out] = "out" if i == len(calls) - 1 else f"y{i + 1}"
        renamed = [
            LeafCall(names[c.out], c.leaf, tuple((a, names[v]) for a, v in c.arguments))
            for c in calls
        ]
        return Program(renamed, "out"), names


def _canonical_order(calls: list[LeafCall]) -> list[LeafCall]:
    """The calls in canonical order: ready calls are ordered by leaf, then by uses of the output."""
    uses: dict[str, str] = {}
    for call in reversed(calls):  # A reader comes after the call that computes the value.
        readers = sorted(
            f"{formal} of {uses[reader.out]}"
            for reader in calls
            for formal, value in reader.arguments
            if value == call.out
        )
        text = f"{call.leaf} for [{', '.join(readers)}]"
        if len(text) > LONGEST_USE:  # A value that is read twice lists its uses twice.
            text = text[:LONGEST_USE] + sha256(text.encode()).hexdigest()
        uses[call.out] = text
    ordered: list[LeafCall] = []
    waiting = list(calls)
    while waiting:
        pending = {call.out for call in waiting}
        ready = [call for call in waiting if not call.reads & pending]
        ordered.append(min(ready, key=lambda call: uses[call.out]))
        waiting.remove(ordered[-1])
    return ordered
