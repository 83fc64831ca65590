"""Which token is in which slot of which window, and the score of two slots.

Windows start at …, σ − w, σ, σ + w, … along each axis. Window (I, J) of w_r × w_c slots has in
slot m

    row    r = first_r + I w_r + ⌊m / w_c⌋,      column    c = first_c + J w_c + m mod w_c,

with first = −((w − σ) mod w), and so token r C + c of a grid of C columns, if that is in the grid.
Nothing is rolled, cut or filled up: a window at the border has fewer tokens. (Swin's cyclic shift
puts two such windows into one, and masks their pairs.) A sequence is a grid of one column.

    S_ij = s q_i·k_j + table[(r_i − r_j + w_r − 1) (2 w_c − 1) + c_i − c_j + w_c − 1]
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from precondattn_triton.tiles import LOG2_E


class Grid(NamedTuple):
    """The windows of a call, as kernels read them."""

    windows: int
    """How many there are."""
    across: int
    """How many there are next to each other."""
    columns: int
    first_row: int
    first_column: int


class Size(NamedTuple):
    """Rows and columns of a window."""

    rows: int
    columns: int

    @property
    def slots(self) -> int:
        return self.rows * self.columns


def grid_of(windows: Any, s: int) -> tuple[Grid, Size]:
    """The windows (`spec.grid_windows.Windows`) of s tokens."""
    is_sequence = windows.columns is None
    size = Size(*windows.size, *((1,) if is_sequence else ()))
    shift = (*windows.shift, *((0,) if is_sequence else ()))
    columns = 1 if is_sequence else windows.columns
    first = [-((w - by) % w) for w, by in zip(size, shift, strict=True)]
    lengths = triton.cdiv(s, columns), columns
    counts = [triton.cdiv(n - at, w) for n, at, w in zip(lengths, first, size, strict=True)]
    return Grid(counts[0] * counts[1], counts[1], columns, *first), size


@triton.jit
def window_of_program(tiles, windows, heads):
    """This program's tile of slots, window, batch and head, in a grid of that order."""
    program = tl.program_id(0)
    tile = program % tiles
    window = program // tiles % windows
    head = program // tiles // windows
    return tile, window, (head // heads).to(tl.int64), (head % heads).to(tl.int64)


@triton.jit
def tokens_of(
    slot, window, across, columns, first_row, first_column, s,
    W_ROWS: tl.constexpr, W_COLUMNS: tl.constexpr,
):  # fmt: skip
    """The token in each slot of a window, and whether there is one."""
    row = first_row + window // across * W_ROWS + slot // W_COLUMNS
    column = first_column + window % across * W_COLUMNS + slot % W_COLUMNS
    token = row * columns + column
    inside = (row >= 0) & (column >= 0) & (column < columns) & (token < s)
    return token, inside & (slot < W_ROWS * W_COLUMNS)


@triton.jit
def and_valid(is_present, valid, batch, tokens, count):
    """Which of these tokens are valid; `valid` is (b, count), or None if all are."""
    if valid is not None:
        is_present = is_present & (
            tl.load(valid + batch * count + tokens, mask=is_present, other=0) != 0
        )
    return is_present


@triton.jit
def with_bias(
    scores, table, head, query_slot, key_slot, mask, table_entry, table_head,
    W_ROWS: tl.constexpr, W_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Scores in units of log 2 and the table's numbers for their pairs, −∞ where masked."""
    if table is not None:
        down = query_slot // W_COLUMNS - key_slot // W_COLUMNS + (W_ROWS - 1)
        right = query_slot % W_COLUMNS - key_slot % W_COLUMNS + (W_COLUMNS - 1)
        entry = down * (2 * W_COLUMNS - 1) + right
        at = table + entry * table_entry + head * table_head
        scores += tl.load(at, mask=mask, other=0.0).to(tl.float32) * LOG2_E
    return tl.where(mask, scores, float("-inf"))
