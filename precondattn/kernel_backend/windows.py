"""The windows of a grid, as kernels index them, and the calls that kernels decline.

Windows start at …, σ − w, σ, σ + w, … along each axis. Window (I, J) of w_r × w_c slots has in
slot m

    row    r = first_r + I w_r + ⌊m / w_c⌋,      column    c = first_c + J w_c + m mod w_c,

with first = −((w − σ) mod w), and so token r C + c of a grid with C columns, if it is in the grid.
Nothing is rolled, cropped or padded: a window at the border has fewer tokens. (Swin's cyclic shift
puts two such windows into one, and masks their pairs.) A sequence is a grid with one column.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from precondattn.backend import Request
from precondattn.spec.grid_windows import GridWindows
from precondattn.spec.read import MEAN
from precondattn.spec.windowed import Windowed

MOST_SLOTS = 1024
"""The most tokens of a window; the gradient of the bias table needs a number for each pair."""

TOGETHER = 16
"""The number of windows over which one program sums the gradient of the bias table."""


class WindowGrid(NamedTuple):
    """The windows of a call."""

    windows: int
    """The number of windows."""
    across: int
    """The number of windows in a row of windows."""
    columns: int
    first_row: int
    first_column: int


class WindowSize(NamedTuple):
    """The numbers of rows and columns of a window."""

    rows: int
    columns: int

    @property
    def slots(self) -> int:
        return self.rows * self.columns

    @property
    def axes(self) -> tuple[int, ...]:
        """The sizes of a window of a grid, or of a sequence, as the option `window` has them."""
        return (self.rows,) if self.columns == 1 else (self.rows, self.columns)


def grid_of(windows: GridWindows, s: int) -> tuple[WindowGrid, WindowSize]:
    """The numbers and the size of the windows of s tokens."""
    columns = windows.columns or 1
    size = WindowSize(*windows.size, *((1,) if windows.columns is None else ()))
    shift = (*windows.shift, *((0,) if windows.columns is None else ()))
    first = [-((w - by) % w) for w, by in zip(size, shift, strict=True)]
    lengths = -(-s // columns), columns
    counts = [-(-(n - at) // w) for n, at, w in zip(lengths, first, size, strict=True)]
    return WindowGrid(counts[0] * counts[1], counts[1], columns, *first), size


def declined_windows(leaf: Windowed, request: Request) -> str | None:
    """The reason why no kernel supports a call of `Windowed`; None if one may."""
    if leaf.read != MEAN:
        return "has no kernel for windows with LASER's read"
    if "segment_ids" in request.masks:
        return "has no kernel for windows of packed sequences"
    if any(0 in shape for _, shape in request.shapes):
        return "its kernels for windows support no empty arrays"
    slots = math.prod(leaf.windows.size)
    if slots > MOST_SLOTS:
        return f"supports windows of at most {MOST_SLOTS} tokens; found {slots}"
    return None
