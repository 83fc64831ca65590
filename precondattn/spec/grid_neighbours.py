"""The tokens at given offsets from each token of a grid, in its own sequence.

A grid with rows of W tokens has token p at row ⌊p / W⌋ and column p mod W, so the neighbour at the
offset (r, c) is token p + r W + c, if that is in the same sequence and c does not leave the row.
Without columns a grid is a sequence, and an offset has one number. Masked tokens are no neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from precondattn.arrays import Array, namespace, zero_where_not
from precondattn.frame import Frame
from precondattn.spec.array_functions import moved
from precondattn.spec.grid_windows import positions
from precondattn.spec.whole_sequence import segment_numbers, valid_as_both

Offset = tuple[int, ...]


class GridNeighbours:
    """The neighbours of the tokens of a call; rows of tokens are (b, h, t, …)."""

    def __init__(self, columns: int | None, frame: Frame) -> None:
        self.columns = columns
        _, self.position = positions(frame)
        ids = frame.k_segment
        self.segment = None if ids is None else segment_numbers(ids)
        valid = valid_as_both(frame.q_valid, frame.k_valid)
        self.valid = self.position >= 0 if valid is None else valid

    def there(self, offset: Offset) -> Array:
        """Whether each token has a neighbour at this offset, (b or 1, t)."""
        step = self._step(offset)
        there = moved(self.valid, step, axis=1)
        if self.segment is not None:
            there = there & (moved(self.segment, step, axis=1) == self.segment)
        if self.columns is not None:
            column = self.position % self.columns + offset[1]
            there = there & (column >= 0) & (column < self.columns)
        return there

    def starts_cell(self, sides: Sequence[int]) -> Array:
        """Whether each token is the first of a cell, where cells of these sides fill the grid."""
        if self.columns is None:
            return self.position % sides[0] == 0
        row, column = self.position // self.columns, self.position % self.columns
        return (row % sides[0] == 0) & (column % sides[1] == 0)

    def of(self, x: Array, offset: Offset) -> Array:
        """The row of each token's neighbour at an offset; 0 if there is none."""
        return self._only_there(moved(x, self._step(offset), axis=2), offset)

    def to(self, x: Array, offset: Offset) -> Array:
        """The row of each token, moved to its neighbour: the transpose of `of`."""
        return moved(self._only_there(x, offset), -self._step(offset), axis=2)

    def _step(self, offset: Offset) -> int:
        return offset[0] if self.columns is None else offset[0] * self.columns + offset[1]

    def _only_there(self, x: Array, offset: Offset) -> Array:
        there = self.there(offset)
        shape = (there.shape[0], 1, there.shape[1], *(1,) * (x.ndim - 3))
        return zero_where_not(namespace(x).reshape(there, shape), x)


def offsets(sides: Sequence[int], *, centred: bool) -> list[Offset]:
    """The offsets of a window's slots from its token, or of a cell's tokens from its first."""
    return list(product(*(range(-(n // 2) * centred, n - (n // 2) * centred) for n in sides)))
