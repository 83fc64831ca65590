"""Covering arrays: rows of levels with every compatible pair of levels, and triples of some.

    rows = covering({"time": ("1", "17"), "mask": ("none", "lengths")}, goes_together)

The algorithm is greedy. It chooses one level at a time, of any factor: the one with the most pairs
that are not yet covered, then the least used, then the first. So the first rows cover as many pairs
as possible. Nothing is random and nothing depends on hash order, so the rows are the same
everywhere.

A pair is left out if no row can contain it, because some factor has no level compatible with
both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations

Level = tuple[str, str]
"""A factor and one of its levels."""

Row = dict[str, str]
GoesTogether = Callable[[Level, Level], bool]


class CoveringArray:
    """The rows of a design; internally, bits of an integer stand for levels."""

    def __init__(
        self,
        levels: Mapping[str, Sequence[str]],
        goes_together: GoesTogether,
        triples: Sequence[str] = (),
        first: Sequence[Row] = (),
    ) -> None:
        """`first` are levels that the first rows should have if compatible, most important
        first."""
        self.names: list[Level] = [(f, level) for f, chosen in levels.items() for level in chosen]
        numbers = {name: i for i, name in enumerate(self.names)}
        self._factor = [list(levels).index(factor) for factor, _ in self.names]
        self._of_factor = [0] * len(levels)
        for i, factor in enumerate(self._factor):
            self._of_factor[factor] |= 1 << i
        self._together = [0] * len(self.names)
        for (i, one), (j, other) in combinations(enumerate(self.names), 2):
            if one[0] != other[0] and goes_together(one, other):
                self._together[i] |= 1 << j
                self._together[j] |= 1 << i
        self._triples = [
            tuple(numbers[factor, level] for level in levels[factor])
            for factor in triples
            if factor in levels
        ]
        self._used = [0] * len(self.names)
        self._missing = list(self._together)
        """For each level, the levels with which it shares no row yet."""
        self.first: list[Row] = []
        for wanted in first:
            row = self._with_most_of([numbers[x] for x in wanted.items() if x in numbers])
            if row is not None and (taken := self._taken(row)) not in self.first:
                self.first.append(taken)

    @cached_property
    def pairs(self) -> list[Row]:
        """The rows that cover every pair, starting with the first rows."""
        return [*self.first, *self._rows_of_pairs()]

    @cached_property
    def pairs_in_rows(self) -> frozenset[tuple[Level, Level]]:
        """Every compatible pair of levels, except those that no row can contain."""
        return frozenset(pair for row in self.pairs for pair in pairs_of(row))

    @cached_property
    def rows(self) -> list[Row]:
        """The rows that cover every pair, followed by those that cover the triples."""
        return [*self.pairs, *self._rows_of_triples()]

    def _rows_of_pairs(self) -> Iterator[Row]:
        while any(self._missing):
            first = max(range(len(self.names)), key=lambda i: (self._missing[i].bit_count(), -i))
            second = max(
                _bits(self._missing[first]), key=lambda i: (self._missing[i].bit_count(), -i)
            )
            row = self._completed((first, second))
            if row is None:
                self._missing[first] &= ~(1 << second)
                self._missing[second] &= ~(1 << first)
            else:
                yield self._taken(row)

    def _rows_of_triples(self) -> Iterator[Row]:
        had: set[tuple[int, ...]] = set()
        for row in self.pairs:
            had |= self._triples_in(map(self.names.index, row.items()))
        for groups in combinations(self._triples, 3):
            for a in groups[0]:
                for b in groups[1]:
                    for c in groups[2]:
                        if tuple(sorted((a, b, c))) in had:
                            continue
                        completed = self._completed((a, b, c))
                        if completed is not None:
                            had |= self._triples_in(completed)
                            yield self._taken(completed)

    def _triples_in(self, row: Iterable[int]) -> set[tuple[int, ...]]:
        inside = sorted(i for i in row if any(i in group for group in self._triples))
        return set(combinations(inside, 3))

    def _with_most_of(self, wanted: Sequence[int]) -> list[int] | None:
        """A row with as many of these levels as are compatible; earlier levels have priority."""
        kept: list[int] = []
        for i in wanted:
            if all(self._together[i] >> j & 1 for j in kept):
                kept.append(i)
        while kept:
            row = self._completed(kept)
            if row is not None:
                return row
            kept.pop()
        return None

    def _completed(self, given: Sequence[int]) -> list[int] | None:
        """A row with these levels; None if there is none."""
        allowed, chosen, left = (1 << len(self.names)) - 1, 0, set(range(len(self._of_factor)))
        for i in given:
            if not allowed >> i & 1:
                return None
            allowed &= self._together[i] | self._of_factor[self._factor[i]]
            chosen |= 1 << i
            left.discard(self._factor[i])
        return self._searched(allowed, chosen, left, list(given))

    def _searched(
        self, allowed: int, chosen: int, left: set[int], row: list[int]
    ) -> list[int] | None:
        if not left:
            return row
        if any(not allowed & self._of_factor[factor] for factor in left):
            return None
        missing, used = self._missing, self._used
        best, most = -1, (-1, 0, 0)
        for factor in left:
            for i in _bits(allowed & self._of_factor[factor]):
                merit = ((missing[i] & chosen).bit_count(), -used[i], -i)
                if merit > most:
                    best, most = i, merit
        factor = self._factor[best]
        others = sorted(
            _bits(allowed & self._of_factor[factor]), key=lambda i: (i != best, self._used[i], i)
        )
        for i in others:
            found = self._searched(
                allowed & (self._together[i] | self._of_factor[factor]),
                chosen | 1 << i,
                left - {factor},
                [*row, i],
            )
            if found is not None:
                return found
        return None

    def _taken(self, row: list[int]) -> Row:
        bits = sum(1 << i for i in row)
        for i in row:
            self._missing[i] &= ~bits
            self._used[i] += 1
        return dict(self.names[i] for i in sorted(row))


def _bits(number: int) -> list[int]:
    """The positions of the bits that are 1, the lowest first."""
    positions = []
    while number:
        lowest = number & -number
        positions.append(lowest.bit_length() - 1)
        number ^= lowest
    return positions


def pairs_of(row: Row) -> Iterator[tuple[Level, Level]]:
    """The pairs of levels in a row."""
    return combinations(row.items(), 2)
