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
from itertools import combinations, product

import numpy as np

Level = tuple[str, str]
"""A factor and one of its levels."""

Row = dict[str, str]


class CoveringArray:
    """The rows of a design; internally, bits of an integer stand for levels, and for rows."""

    def __init__(
        self,
        levels: Mapping[str, Sequence[str]],
        goes_together: Callable[[Level, Level], bool],
        triples: Sequence[str] = (),
        first: Sequence[Row] = (),
    ) -> None:
        """`first` are levels that the first rows should have if compatible, most important
        first."""
        self.names: list[Level] = [(f, level) for f, chosen in levels.items() for level in chosen]
        numbers = {name: i for i, name in enumerate(self.names)}
        factors = [[numbers[factor, level] for level in levels[factor]] for factor in levels]
        self._triples = [factors[list(levels).index(f)] for f in triples if f in levels]
        self._factors = [_number(factor) for factor in factors]
        """The levels of each factor."""
        self._together = [0] * len(self.names)
        for (i, one), (j, other) in combinations(enumerate(self.names), 2):
            if one[0] != other[0] and goes_together(one, other):
                self._together[i] |= 1 << j
                self._together[j] |= 1 << i
        self._used = [0] * len(self.names)
        self._missing = list(self._together)
        """For each level, the levels with which it shares no row yet."""
        self._taken: list[int] = []
        for wanted in first:
            row = self._with_most_of([numbers[x] for x in wanted.items() if x in numbers])
            if row is not None:
                self._take(row)
        self.first: list[Row] = [self._named(row) for row in dict.fromkeys(self._taken)]

    @cached_property
    def pair_rows(self) -> list[Row]:
        """The rows that cover every pair, starting with the first rows."""
        return [*self.first, *map(self._named, self._rows_of_pairs())]

    @cached_property
    def rows(self) -> list[Row]:
        """The rows that cover every pair, followed by those that cover the triples."""
        return [*self.pair_rows, *map(self._named, self._rows_of_triples())]

    def drawn(self, count: int) -> list[Row]:
        """Rows of compatible levels that are drawn at random, the same in every run."""
        rng = np.random.default_rng([22, count])
        orders = (rng.permutation(len(self.names)).tolist() for _ in range(count))
        return [self._named(row) for order in orders if (row := self._with_most_of(order))]

    def _rows_of_pairs(self) -> Iterator[int]:
        def rank(i: int) -> tuple[int, int]:
            return self._missing[i].bit_count(), -i

        while any(self._missing):
            one = max(range(len(self.names)), key=rank)
            other = max(_bits(self._missing[one]), key=rank)
            row = self._completed((one, other))
            if row is None:
                self._missing[one] &= ~(1 << other)
                self._missing[other] &= ~(1 << one)
            else:
                yield self._take(row)

    def _rows_of_triples(self) -> Iterator[int]:
        for triple in (t for three in combinations(self._triples, 3) for t in product(*three)):
            wanted = _number(triple)
            if not any(row & wanted == wanted for row in self._taken):
                row = self._completed(triple)
                if row is not None:
                    yield self._take(row)

    def _with_most_of(self, wanted: Sequence[int]) -> int | None:
        """A row with as many of these levels as are compatible; earlier levels have priority."""
        kept: list[int] = []
        for i in wanted:
            if all(self._together[i] >> j & 1 for j in kept):
                kept.append(i)
        possible = (self._completed(kept[:count]) for count in range(len(kept), 0, -1))
        return next((row for row in possible if row is not None), None)

    def _completed(self, levels: Sequence[int]) -> int | None:
        """A row with these levels; None if there is none."""
        free, chosen = (1 << len(self.names)) - 1, 0
        for i in levels:
            if not free >> i & 1:
                return None
            free, chosen = free & self._together[i], chosen | 1 << i
        return self._searched(free, chosen)

    def _searched(self, free: int, chosen: int) -> int | None:
        """A row with the chosen levels and, of the other factors, with levels that are free."""
        open_factors = [factor for factor in self._factors if not factor & chosen]
        if not open_factors or not all(factor & free for factor in open_factors):
            return None if open_factors else chosen
        missing, used = self._missing, self._used
        best = max(_bits(free), key=lambda i: ((missing[i] & chosen).bit_count(), -used[i], -i))
        (factor,) = (factor for factor in open_factors if factor >> best & 1)
        for i in sorted(_bits(factor & free), key=lambda i: (i != best, used[i], i)):
            row = self._searched(free & self._together[i], chosen | 1 << i)
            if row is not None:
                return row
        return None

    def _take(self, row: int) -> int:
        for i in _bits(row):
            self._missing[i] &= ~row
            self._used[i] += 1
        self._taken.append(row)
        return row

    def _named(self, row: int) -> Row:
        return dict(self.names[i] for i in _bits(row))


def _bits(number: int) -> list[int]:
    """The positions of the bits that are 1, the lowest first."""
    positions = []
    while number:
        lowest = number & -number
        positions.append(lowest.bit_length() - 1)
        number ^= lowest
    return positions


def _number(bits: Iterable[int]) -> int:
    return sum(1 << i for i in bits)
