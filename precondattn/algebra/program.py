"""Programs: what a mechanism is once its steps are unfolded, a list of leaf calls.

`lucid(laser)` is

    y = lucid_solve(k, v); out = softmax[read=log_mean_exp](q, k, v=y)

Every value has one name and is computed once; a leaf called twice on the same values is one call.
Output, gradient, cache, declared inputs and the choice of backends are all derived from the
program. Equal programs get equal kernels, however the mechanism was written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from precondattn.algebra.axes import letters_of
from precondattn.algebra.declaration import Pattern
from precondattn.algebra.leaf_call import LeafCall
from precondattn.cache import Slot

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Leaf


class Program:
    """Leaf calls in order; the last value named `out` is the result. Hashable by its text."""

    def __init__(
        self,
        calls: Iterable[LeafCall],
        out: str,
        meanings: Mapping[str, object] | None = None,
    ) -> None:
        self.calls = tuple(calls)
        self.out = out
        patterns, self.axes = letters_of(self.calls)
        made = {call.out for call in self.calls}
        used = dict.fromkeys(value for call in self.calls for _, value in call.arguments)
        self.inputs = {value: patterns[value] for value in used if value not in made}
        """Each input's pattern, in order of first use."""
        self.output = patterns[out]
        """The pattern of the result."""
        self.meanings = dict(meanings or dict.fromkeys(self.inputs, "given"))
        """What each input means."""
        self.text = "; ".join(map(str, self.calls))

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<program {self.text}>"

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and (self.text, self.out) == (other.text, other.out)

    @cached_property
    def slots(self) -> dict[str, tuple[Slot, Pattern]]:
        """The buffers of its cache by name, and their patterns in this program's letters."""
        found: dict[str, tuple[Slot, Pattern]] = {}
        for call, axes in zip(self.calls, self.axes, strict=True):
            keys = call.slot_keys()
            for slot in call.leaf.slots():
                pattern = Pattern.read(slot.pattern).substituted(axes)
                found.setdefault(keys[slot.name], (slot, pattern))
        return found

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return tuple(call.leaf for call in self.calls)

    def part(self, chosen: Iterable[int]) -> tuple[Program, dict[str, str]]:
        """Some of the calls as a program of their own, and its names for this program's values.

        Names in a part do not depend on where it was cut from: a value from outside is called
        what the first leaf to read it calls it (with a number where that is taken), a value made
        inside is y1, y2 … and the result is out. So `softmax` around `lucid_solve` is one
        program, whether or not something stands before, between or after them.
        """
        calls = _canonical_order([self.calls[i] for i in sorted(chosen)])
        names: dict[str, str] = {}
        made = {call.out for call in calls}
        taken: set[str] = set()
        for call in calls:
            for formal, value in call.arguments:
                if value in made or value in names:
                    continue
                name, number = formal, 1
                while name in taken:
                    number += 1
                    name = f"{formal}{number}"
                taken.add(name)
                names[value] = name
        for i, call in enumerate(calls):
            names[call.out] = "out" if i == len(calls) - 1 else f"y{i + 1}"
        renamed = [
            LeafCall(names[c.out], c.leaf, tuple((a, names[v]) for a, v in c.arguments))
            for c in calls
        ]
        return Program(renamed, "out"), names


def _canonical_order(calls: list[LeafCall]) -> list[LeafCall]:
    """The calls in an order that does not depend on how independent ones were written.

    Of calls that could come next, the order is that of what they are and what they are used for.
    """
    uses: dict[str, str] = {}
    for call in reversed(calls):  # Whoever reads a value comes after the call that makes it.
        readers = sorted(
            f"{formal} of {uses[reader.out]}"
            for reader in calls
            for formal, value in reader.arguments
            if value == call.out
        )
        uses[call.out] = f"{call.leaf} for [{', '.join(readers)}]"
    ordered: list[LeafCall] = []
    waiting = list(calls)
    while waiting:
        to_come = {call.out for call in waiting}
        ready = [call for call in waiting if not call.reads & to_come]
        following = min(ready, key=lambda call: uses[call.out])
        ordered.append(following)
        waiting.remove(following)
    return ordered
