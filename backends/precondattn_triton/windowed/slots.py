"""The token in each slot of a window, and the scores of pairs of slots.

Slots are numbered as in `kernel_backend/windows.py`.

    S_ij = s q_i·k_j + table[(r_i − r_j + w_r − 1) (2 w_c − 1) + c_i − c_j + w_c − 1]
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.tiles import LOG2_E


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
    """Which tokens exist and are valid; `valid` is (b, count), or None if all are valid."""
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
