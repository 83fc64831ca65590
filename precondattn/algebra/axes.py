"""The dimension letters of a program: one name for each axis size, the same in all leaf calls.

The letters of a leaf are local to it: a token-wise leaf declares `"b t h d"` for any input, and a
feature map declares an output axis `2*d`. A value that one call computes and another reads, or that
two calls read, has one shape. So the letters of different calls are equated axis by axis:

    out = gla(q=q_map, …)     q_map: b t h d,    g: b s n d
    q_map = hedgehog_map(q)   q_map: b t h 2*d,  q: b t h d

The d of `gla` is twice that of `hedgehog_map`, so g is `b s n 2*d` in the letters of q. Such
letters form a family, with the name of the base's letter, or else of the last call's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import lcm

from precondattn.algebra.declaration import FIXED, Axis, Pattern
from precondattn.algebra.leaf_protocol import LeafCall

CallLetter = tuple[int, str]

Factor = int | Fraction
"""The ratio of two letters. Most are the integer 1, because fractions are slow."""

UNIT: CallLetter = (-1, FIXED)
"""The size 1; every fixed size is a multiple of it."""

Declarations = dict[str, list[tuple[int, Pattern]]]
"""The (call index, pattern) of each call that reads or computes a value, by value. The last reader
comes first, the producer last."""

Axes = tuple[dict[str, Axis], ...]

SPARE_LETTERS = "fgijklopqrvwxyz"
"""The letters that no leaf uses, for families whose own letters are all taken."""


class _Families:
    """Union-find over letters, each of which is a multiple of its family's root."""

    def __init__(self) -> None:
        self.parent: dict[CallLetter, tuple[CallLetter, Factor]] = {}

    def root(self, letter: CallLetter) -> tuple[CallLetter, Factor]:
        """The pair (root, factor) with letter = factor · root."""
        parent, factor = self.parent.setdefault(letter, (letter, 1))
        if parent == letter:
            return letter, factor
        root, parent_factor = self.root(parent)
        self.parent[letter] = root, factor * parent_factor
        return self.parent[letter]

    def root_of(self, number: int, axis: Axis) -> tuple[CallLetter, Factor]:
        """The pair (root, factor) with size = factor · root, for an axis of call `number`."""
        root, factor = self.root(UNIT if axis.letter == FIXED else (number, axis.letter))
        return root, axis.multiple * factor

    def equate(self, number_a: int, a: Axis, number_b: int, b: Axis) -> bool:
        """Record that two axes have the same size; False if this is a contradiction."""
        (root_a, times_a), (root_b, times_b) = self.root_of(number_a, a), self.root_of(number_b, b)
        if root_a == root_b:
            return times_a == times_b
        self.parent[root_a] = root_b, 1 if times_a == times_b else Fraction(times_b, times_a)
        return True


def letters_of(calls: Sequence[LeafCall]) -> tuple[dict[str, Pattern], Axes]:
    """The pattern of every value, and the axes of every call, in the letters of the program."""
    declarations: Declarations = {}
    for number in reversed(range(len(calls))):
        call = calls[number]
        declarations.setdefault(call.out, []).append((number, Pattern.read(call.leaf.output)))
        for formal, value in call.arguments:
            declarations.setdefault(value, []).append((number, call.leaf.inputs[formal]))
    last = {value: declared[0] for value, declared in declarations.items()}
    if len(calls) > 1 or max(map(len, declarations.values())) > 1:
        axes = _program_axes(calls, declarations)
        patterns = {name: pattern.substituted(axes[n]) for name, (n, pattern) in last.items()}
    else:
        patterns = {name: pattern for name, (_, pattern) in last.items()}
        axes = ({letter: Axis(letter) for letter in _letters(patterns.values())},)
    for call in calls:
        for formal, value in call.arguments:
            if formal in call.leaf.allows_any_length:
                patterns[value] = patterns[value]._replace(unit=False, row=False)
    return patterns, axes


def _letters(patterns: Iterable[Pattern]) -> dict[str, None]:
    """The letters of the patterns in order, without duplicates."""
    return dict.fromkeys("".join([pattern.letters for pattern in patterns]).replace(FIXED, ""))


def _equated(calls: Sequence[LeafCall], declarations: Declarations) -> _Families:
    """The families of letters, after all axes of equal size are equated."""
    families = _Families()
    for value, declared in declarations.items():
        number_of_last, last = declared[0]
        for number, pattern in declared[1:]:
            fits = len(last.axes) == len(pattern.axes) and all(
                families.equate(number_of_last, a, number, b)
                for a, b in zip(last.axes, pattern.axes, strict=True)
            )
            if not fits:
                raise TypeError(
                    f"{value} can not be both what {calls[number_of_last].leaf} declares ({last}) "
                    f"and what {calls[number].leaf} declares ({pattern})"
                )
    numbers: dict[str, int] = {}
    for number, call in enumerate(calls):
        if call.leaf.is_base:  # Two calls of a base have equal sizes, unless values contradict.
            for letter in _letters((Pattern.read(call.leaf.output), *call.leaf.inputs.values())):
                axis = Axis(letter)
                families.equate(numbers.setdefault(letter, number), axis, number, axis)
    return families


def _program_axes(calls: Sequence[LeafCall], declarations: Declarations) -> Axes:
    families = _equated(calls, declarations)
    members: dict[CallLetter, list[CallLetter]] = {}
    patterns_of: list[list[Pattern]] = [[] for _ in calls]
    for declared in declarations.values():
        for number, pattern in declared:
            patterns_of[number].append(pattern)
    for number in sorted(range(len(calls)), key=lambda i: (not calls[i].leaf.is_base, -i)):
        for letter in _letters(patterns_of[number]):
            members.setdefault(families.root((number, letter))[0], []).append((number, letter))
    axes: Axes = tuple({} for _ in calls)
    taken: set[str] = set()
    fixed_root, unit_factor = families.root(UNIT)
    for root, family in members.items():
        factors = {member: families.root(member)[1] for member in family}
        if root == fixed_root:
            for (number, letter), factor in factors.items():
                size = Fraction(factor, unit_factor)
                if size.denominator != 1:
                    raise TypeError(f"{letter} of {calls[number].leaf} can not be {size}")
                axes[number][letter] = Axis(FIXED, int(size))
            continue
        candidates = (*(letter for _, letter in family), *SPARE_LETTERS)
        name = next(letter for letter in candidates if letter not in taken)
        taken.add(name)
        # The smallest member has the factor 1.
        unit = lcm(*(factor.denominator for factor in factors.values()))
        for (number, letter), factor in factors.items():
            axes[number][letter] = Axis(name, int(factor * unit))
    return axes
