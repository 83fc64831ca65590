"""The windows of a grid of tokens, and the relative positions of tokens in a window.

Token p of a grid with rows of W tokens is at row ⌊p / W⌋ and column p mod W; without a grid it is
at p. Along each axis, windows of w tokens start at …, σ − w, σ, σ + w, …, so that x is in window

    ⌊(x − σ) / w⌋.

These are the windows of Swin's cyclic shift by σ with its region mask: there the window that wraps
around consists of two parts that do not attend to each other.

Two tokens of a window are Δ = x_i − x_j apart, −w < Δ < w, along each axis. Their entry of the
table of relative positions is

    (Δ_r + w_r − 1) (2 w_c − 1) + Δ_c + w_c − 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from precondattn.algebra.declaration import ShapeError
from precondattn.arrays import Array, differs_from_previous, namespace, running_maximum
from precondattn.frame import Frame


class GridWindows(NamedTuple):
    """Windows along each axis of a grid, which has one axis or two."""

    size: tuple[int, ...]
    """The size w of a window along each axis."""
    shift: tuple[int, ...]
    """The shift σ along each axis, less than w."""
    columns: int | None
    """The number W of columns; None without a grid."""

    @property
    def entries(self) -> int:
        """The number of entries of the table, for each head."""
        return prod(2 * w - 1 for w in self.size)

    def coordinates(self, position: Array) -> list[Array]:
        """The coordinates of tokens along each axis of the grid, from their positions."""
        if self.columns is None:
            return [position]
        return [position // self.columns, position % self.columns]

    def share(self, q_position: Array, k_position: Array) -> Array:
        """Whether queries (b, t) and keys (b, s) are in the same window, (b, t, s)."""
        axes = zip(
            self.coordinates(q_position),
            self.coordinates(k_position),
            self.size,
            self.shift,
            strict=True,
        )
        same = q_position[:, :, None] == q_position[:, :, None]
        for x_q, x_k, w, shift in axes:
            i, j = ((x + (w - shift)) // w for x in (x_q, x_k))  # No number is negative.
            same = same & (i[:, :, None] == j[:, None, :])
        return same

    def entry(self, q_position: Array, k_position: Array) -> Array:
        """The table's entry for each pair (b, t, s) of a window; any entry for other pairs."""
        xp = namespace(q_position)
        axes = zip(
            self.coordinates(q_position), self.coordinates(k_position), self.size, strict=True
        )
        entry = 0 * (q_position[:, :, None] - k_position[:, None, :])
        for x_q, x_k, w in axes:
            apart = xp.clip(x_q[:, :, None] - x_k[:, None, :], 1 - w, w - 1)
            entry = entry * (2 * w - 1) + apart + (w - 1)
        return entry


def sum_by_entry(pairs: Array, size: Sequence[int]) -> Array:
    """Σ over the pairs of slots of each entry of the table, from (h, w, w): (entries, h)."""
    xp, h = namespace(pairs), pairs.shape[0]
    if len(size) == 1:
        return xp.permute_dims(_sum_by_difference(pairs), (1, 0))
    rows, columns = size
    pairs = xp.reshape(pairs, (h, rows, columns, rows, columns))
    of_rows = _sum_by_difference(xp.permute_dims(pairs, (0, 2, 4, 1, 3)))
    of_both = _sum_by_difference(xp.permute_dims(of_rows, (0, 3, 1, 2)))
    return xp.permute_dims(xp.reshape(of_both, (h, -1)), (1, 0))


def _sum_by_difference(x: Array) -> Array:
    """Σ_{i − j = Δ} x_ij for Δ from 1 − w to w − 1, along the last two axes: (…, 2 w − 1).

    With w zeros after each row, read in rows of 2 w − 1 elements, every row is one to the right of
    the row above.
    """
    xp, w = namespace(x), x.shape[-1]
    rows = xp.concat([xp.flip(x, axis=-1), xp.zeros_like(x)], axis=-1)
    shifted = xp.reshape(rows, (*x.shape[:-2], -1))[..., : w * (2 * w - 1)]
    return xp.sum(xp.reshape(shifted, (*x.shape[:-2], w, 2 * w - 1)), axis=-2)


def positions(frame: Frame) -> tuple[Array, Array]:
    """The positions of queries and keys in their own sequence: segments start at 0."""
    k_position, t = frame.k_position, frame.q_position.shape[1]
    if frame.k_segment is not None:
        xp, segment = namespace(k_position), frame.k_segment
        is_first = differs_from_previous(segment)
        k_position = k_position - running_maximum(xp.where(is_first, k_position, 0), axis=1)
    return k_position[:, k_position.shape[1] - t :], k_position


def check_axes(name: str, grid: tuple[int, ...] | None, **options: tuple[int, ...]) -> None:
    """Raise an error where an option has more numbers than the grid has axes."""
    axes = 1 if grid is None else 2
    for option, numbers in options.items():
        if len(numbers) > axes:
            raise ValueError(
                f"{name}: {option} has a number for rows and one for columns, and grid=none has "
                f"one axis; found {option}={numbers}"
            )


def check_tokens(
    mechanism: object, grid: tuple[int, ...] | None, s: int, masks: frozenset[str]
) -> None:
    """Raise an error where s tokens, or packed sequences, do not fill a grid of fixed size."""
    if grid is None or len(grid) == 1:
        return
    rows, columns = grid
    if rows * columns != s:
        raise ShapeError(
            f"{mechanism}: a grid of {rows} rows and {columns} columns has {rows * columns} "
            f"tokens; found s = {s} keys"
        )
    if "segment_ids" in masks:
        raise ValueError(
            f"{mechanism}: packed sequences have a grid each, and together fill one; give "
            f"grid={columns}, which fixes no number of rows, or put them in the batch"
        )


def shortest(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """One number in place of two equal ones, so that equal mechanisms have equal options."""
    return numbers[:1] if len(set(numbers)) == 1 else numbers


def each_axis(numbers: Sequence[int], axes: int) -> tuple[int, ...]:
    """One number for each axis, where a single one stands for all."""
    return tuple(numbers) * axes if len(numbers) == 1 else tuple(numbers)
