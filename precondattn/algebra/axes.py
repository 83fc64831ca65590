"""What the axes of a program's values are called.

Every leaf has letters of its own: a token-wise one says `"b t h d"` of whatever it is given, and a
feature map that its output has an axis `2*d`. A value that one call makes and another reads, or
that two calls read, has one shape; so the letters of different calls are compared, axis by axis:

    out = gla(q=q_map, …)     q_map: b t h d,    g: b s n d
    q_map = hedgehog_map(q)   q_map: b t h 2*d,  q: b t h d

The d of `gla` is twice that of `hedgehog_map`; so g is `b s n 2*d` in the terms of q. Letters that
are multiples of one another are a family. It is called what the base calls it, or else the last
call that knows it, and its smallest member has no factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from typing import NamedTuple

from precondattn.algebra.declaration import FIXED, Axis, Pattern
from precondattn.algebra.leaf_call import LeafCall

Own = tuple[int, str]
"""A call's number, and a letter of its leaf."""

ONE: Own = (-1, FIXED)
"""The size 1, of which a fixed size is a multiple."""

SPARE = "fgijklopqrvwxyz"
"""Letters that stand for nothing in particular, for families whose own letter is taken."""


class _Families:
    """Union-find over letters, each a multiple of its family's root."""

    def __init__(self) -> None:
        self.parent: dict[Own, tuple[Own, Fraction]] = {}

    def root(self, own: Own) -> tuple[Own, Fraction]:
        """(root, factor) with own = factor · root."""
        parent, factor = self.parent.setdefault(own, (own, Fraction(1)))
        if parent == own:
            return own, factor
        root, above = self.root(parent)
        self.parent[own] = root, factor * above
        return self.parent[own]

    def equate(self, a: Own, times_a: int, b: Own, times_b: int) -> bool:
        """times_a · a = times_b · b; False where that can not be."""
        (root_a, of_a), (root_b, of_b) = self.root(a), self.root(b)
        if root_a == root_b:
            return times_a * of_a == times_b * of_b
        self.parent[root_a] = root_b, Fraction(times_b * of_b, times_a * of_a)
        return True


class Letters(NamedTuple):
    """Everything in a program's own letters."""

    patterns: dict[str, Pattern]
    """Of every value."""
    axes: tuple[dict[str, Axis], ...]
    """Of every call, what its leaf's letters are."""


def letters_of(calls: Sequence[LeafCall]) -> Letters:
    """The letters of a program, which mean the same in all of its patterns.

    What is said of a value beside its axes, its range, is what its last reader says.

    Raises
    ------
    TypeError
        where two calls contradict each other about the shape of a value.
    """
    said = _what_is_said(calls)
    families = _Families()
    for value, readings in said.items():
        first_call, first = readings[0]
        for number, pattern in readings[1:]:
            fits = len(first.axes) == len(pattern.axes) and all(
                families.equate(_own(first_call, a), a.multiple, _own(number, b), b.multiple)
                for a, b in zip(first.axes, pattern.axes, strict=True)
            )
            if not fits:
                raise TypeError(
                    f"{value} can not be both what {calls[first_call].leaf} declares ({first}) "
                    f"and what {calls[number].leaf} does ({pattern})"
                )
    _equate_bases(calls, families)
    axes = _axes(calls, said, families)
    patterns = {
        value: readings[0][1].substituted(axes[readings[0][0]]) for value, readings in said.items()
    }
    return Letters(patterns, axes)


def _own(number: int, axis: Axis) -> Own:
    return ONE if axis.letter == FIXED else (number, axis.letter)


def _equate_bases(calls: Sequence[LeafCall], families: _Families) -> None:
    """A base that is called twice, as by `differential`, has queries and keys of one size.

    Unless its values have said otherwise: then `equate` leaves the two apart.
    """
    first: dict[str, int] = {}
    for number, call in enumerate(calls):
        if call.leaf.role != "base":
            continue
        patterns = (Pattern.read(call.leaf.output), *call.leaf.inputs.values())
        for letter in dict.fromkeys("".join(p.letters for p in patterns).replace(FIXED, "")):
            other = first.setdefault(letter, number)
            families.equate((other, letter), 1, (number, letter), 1)


def _what_is_said(calls: Sequence[LeafCall]) -> dict[str, list[tuple[int, Pattern]]]:
    """By value, the patterns that calls have for it: the last reader's first, the maker's last."""
    said: dict[str, list[tuple[int, Pattern]]] = {}
    for number in reversed(range(len(calls))):
        call = calls[number]
        said.setdefault(call.out, []).append((number, Pattern.read(call.leaf.output)))
        for formal, value in call.arguments:
            said.setdefault(value, []).append((number, call.leaf.inputs[formal]))
    return said


def _axes(
    calls: Sequence[LeafCall], said: dict[str, list[tuple[int, Pattern]]], families: _Families
) -> tuple[dict[str, Axis], ...]:
    """Of every call, its leaf's letters in the program's."""
    members: dict[Own, list[Own]] = {}
    for number in sorted(range(len(calls)), key=lambda i: (calls[i].leaf.role != "base", -i)):
        patterns = [p for readings in said.values() for at, p in readings if at == number]
        for letter in dict.fromkeys("".join(p.letters for p in patterns).replace(FIXED, "")):
            members.setdefault(families.root((number, letter))[0], []).append((number, letter))
    axes: tuple[dict[str, Axis], ...] = tuple({} for _ in calls)
    taken: set[str] = set()
    fixed, size_of_one = families.root(ONE)
    for root, family in members.items():
        factors = {own: families.root(own)[1] for own in family}
        if root == fixed:
            for (number, letter), factor in factors.items():
                size = factor / size_of_one
                if size.denominator != 1:
                    raise TypeError(f"{letter} of {calls[number].leaf} can not be {size}")
                axes[number][letter] = Axis(FIXED, int(size))
            continue
        wished = (*(letter for _, letter in family), *SPARE)
        name = next(letter for letter in wished if letter not in taken)
        taken.add(name)
        # The smallest member has no factor.
        unit = lcm(*(factor.denominator for factor in factors.values()))
        for (number, letter), factor in factors.items():
            axes[number][letter] = Axis(name, int(factor * unit))
    return axes
