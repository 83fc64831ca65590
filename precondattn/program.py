"""Programs: what a mechanism is once its steps are unfolded, a list of leaf calls.

`lucid(laser)` is

    y = lucid_solve(k, v); out = softmax[read=log_mean_exp](q, k, v=y)

Every value has one name and is made once; a leaf called twice on the same values is one call.
Output, gradient, cache, declared inputs and the choice of backends are all derived from the
program. Equal programs get equal kernels, however the mechanism was written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from precondattn.declaration import Pattern
from precondattn.letters import letters_of

if TYPE_CHECKING:
    from precondattn.cache import Slot
    from precondattn.mechanism import Leaf, Mechanism, Preconditioner


class Call(NamedTuple):
    """One leaf, applied to named values."""

    out: str
    leaf: Leaf
    arguments: tuple[tuple[str, str], ...]
    """(the leaf's name of an input, the name of the value)."""

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(value for _, value in self.arguments)

    def slot_keys(self) -> Mapping[str, str]:
        """The leaf's slots, by the name of the value whose history each holds."""
        return _slot_keys(self)

    def __str__(self) -> str:
        arguments = (a if a == value else f"{a}={value}" for a, value in self.arguments)
        return f"{self.out} = {self.leaf}({', '.join(arguments)})"


@cache
def _slot_keys(call: Call) -> Mapping[str, str]:
    names = {**dict(call.arguments), "out": call.out}
    return {slot.name: slot.holds.format(**names) for slot in call.leaf.slots()}


class Program:
    """Leaf calls in order; the last value named `out` is the result. Hashable by its text."""

    def __init__(
        self,
        calls: Iterable[Call],
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
            Call(names[c.out], c.leaf, tuple((a, names[v]) for a, v in c.arguments)) for c in calls
        ]
        return Program(renamed, "out"), names


def _canonical_order(calls: list[Call]) -> list[Call]:
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
    ordered: list[Call] = []
    waiting = list(calls)
    while waiting:
        to_come = {call.out for call in waiting}
        ready = [call for call in waiting if not call.reads & to_come]
        following = min(ready, key=lambda call: uses[call.out])
        ordered.append(following)
        waiting.remove(following)
    return ordered


def read_program(text: str) -> Program:
    """The program from its text: the inverse of `str` for programs made by `Program.part`."""
    from precondattn.expression import parse

    calls: list[Call] = []
    for line in text.split("; "):
        match = re.fullmatch(r"(\w+) = (.+)\(([^()]*)\)", line)
        if match is None:
            raise ValueError(f"{line!r} is no call of a leaf")
        leaf: Any = parse(match[2])
        arguments = []
        for word in match[3].split(", "):
            formal, _, value = word.partition("=")
            arguments.append((formal, value or formal))
        calls.append(Call(match[1], leaf, tuple(arguments)))
    return Program(calls, calls[-1].out)


@cache
def program_of(mechanism: Mechanism) -> Program:
    """A mechanism, unfolded.

    Raises
    ------
    TypeError
        where two inputs of one name mean different things, or a renaming hits a taken name.
    """
    steps = getattr(mechanism, "steps", None)
    if steps is None:
        leaf: Any = mechanism
        call = Call("out", leaf, tuple((name, name) for name in leaf.inputs))
        meanings = {name: leaf.meaning(name) for name in leaf.inputs}
        return Program([call], "out", meanings)
    return _unfold(mechanism)  # type: ignore[arg-type]


def _unfold(mechanism: Preconditioner) -> Program:
    """The steps' programs, one after the other, under this preconditioner's names."""
    calls: list[Call] = []
    known: dict[tuple[Leaf, tuple[tuple[str, str], ...]], str] = {}
    values: dict[str, str] = {}  # A step's name of its output, or an input -> the value's name.
    meanings: dict[str, object] = {}
    made: set[str] = set()
    steps = mechanism.steps()
    for step in steps:
        inner, renamed = step.mechanism.program, dict(step.renamed)
        unknown = sorted(set(renamed) - set(inner.inputs))
        if unknown:
            raise TypeError(
                f"{mechanism.name}: a step renames {', '.join(unknown)}, and {step.mechanism} "
                f"takes {', '.join(inner.inputs)}"
            )
        if step.out in made:
            raise TypeError(f"{mechanism.name}: two steps make {step.out!r}")
        inside = {}
        for name in step.mechanism.inputs:
            outer = renamed.get(name, name)
            if outer not in made:
                _declare(mechanism, step.mechanism, name, outer, meanings)
                values.setdefault(outer, outer)
            inside[name] = values[outer]
        for call in inner.calls:
            arguments = tuple((formal, inside[value]) for formal, value in call.arguments)
            last = call.out == inner.out
            name = step.out if last else f"{step.out}.{call.out}"
            if (call.leaf, arguments) not in known:
                known[call.leaf, arguments] = name
                calls.append(Call(name, call.leaf, arguments))
            inside[call.out] = known[call.leaf, arguments]
        made.add(step.out)
        if step.out in meanings:
            raise TypeError(f"{mechanism.name}: a step makes {step.out!r}, which is an input too")
        values[step.out] = inside[inner.out]
    return Program(calls, values[steps[-1].out], meanings)


def _declare(
    owner: Preconditioner, piece: Mechanism, name: str, outer: str, meanings: dict[str, object]
) -> None:
    """Note that `piece` reads the input `outer` as its `name`, if that is no contradiction."""
    if outer != name and piece == owner.base and outer in owner.base.inputs:
        raise TypeError(
            f"{owner.name}({owner.base}): {name} would be renamed to {outer}, "
            f"which {owner.base} declares already"
        )
    from precondattn.mechanism import ATTENTION_INPUTS

    if outer == name:
        meaning = piece.meaning(name)
        base = owner.base
        own = piece.role == "piece" and meaning == piece.name
        if own and name in base.inputs and base.meaning(name) == meaning:
            raise TypeError(
                f"{owner.name}({owner.base}) makes no sense: {name} is an input of {owner.base} "
                f"already, and would be used twice"
            )
    elif piece != owner.base and outer in owner.base.inputs:
        meaning = owner.base.meaning(outer)  # The wiring says so: read the base's input.
    else:
        meaning = "attention" if outer in ATTENTION_INPUTS else owner.name
    if meanings.setdefault(outer, meaning) != meaning:
        raise TypeError(
            f"{owner.name}({owner.base}): the input {outer!r} would mean two things, "
            f"that of {meanings[outer]} and that of {meaning}"
        )
