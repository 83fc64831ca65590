"""Rows carried across the borders of a level, and the gradient (`borders.py`).

A level has blocks of `half` tokens, and a border in the middle of every pair of blocks. A row of
the second block is a query x, a row of the first a key κ. With P the product of the reflections of
the other block,

    cross         z = x,    x ← x P        cross_back    dx ← dx Pᵀ + dz
                  z = κ,    κ ← κ Pᵀ                     dκ ← dκ P + dz

If the other block is not complete, the sequence ends there, and rows need not cross it. Rows are
float32, (2, m, T, D): κ, then x; z (m, T, D) are operands of products, and dz is float32.

Grid: one program per tile of rows and head. 2 D² products per token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.tiles import load_rows

PART = 32
"""Channels of a product that a program computes at once."""


@triton.jit
def other_side(rows, head, heads, tokens, start, half, WIDTH: tl.constexpr):
    """The address of x or κ of a tile's head, the block across the border, and whether it is x."""
    block = start // half
    is_query = block % 2
    return rows + (is_query * heads + head) * tokens * WIDTH, block + 1 - 2 * is_query, is_query


@triton.jit
def times_part(
    rows, whole, first, is_transposed,
    WIDTH: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Channels `first` … of rows P, or, transposed, of rows Pᵀ."""
    channels, columns = tl.arange(0, WIDTH), first + tl.arange(0, PART)
    if is_transposed:
        factor = tl.trans(tl.load(whole + columns[:, None] * WIDTH + channels[None, :]))
    else:
        factor = tl.load(whole + channels[:, None] * WIDTH + columns[None, :])
    return tl.dot(rows, factor.to(tl.float32), input_precision=PRECISION)


@triton.jit
def cross(
    rows, whole, at_border, tokens, half, blocks,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`whole` (m, blocks, D, D) is P of the complete blocks of the level."""
    head, heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    start = tl.program_id(0) * ROWS
    at_head, other, is_query = other_side(rows, head, heads, tokens, start, half, WIDTH)
    tile = load_rows(at_head, 0, tokens, start, ROWS, WIDTH, 0, WIDTH)
    token = (start + tl.arange(0, ROWS))[:, None].to(tl.int64)
    at = at_border + (head * tokens + token) * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(at, tile.to(at_border.dtype.element_ty))
    if other < blocks:
        # No thread may overwrite rows that another thread has not read yet.
        tl.debug_barrier()
        whole += (head * blocks + other) * WIDTH * WIDTH
        for first in range(0, WIDTH, PART):
            part = times_part(tile, whole, first, is_query == 0, WIDTH, PART, PRECISION)
            tl.store(at_head + token * WIDTH + first + tl.arange(0, PART)[None, :], part)


@triton.jit
def cross_back(
    d_rows, whole, d_at_border, tokens, half, blocks,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of `cross`: replace that of rows after it by that of rows before it."""
    head, heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    start = tl.program_id(0) * ROWS
    at_head, other, is_query = other_side(d_rows, head, heads, tokens, start, half, WIDTH)
    tile = load_rows(at_head, 0, tokens, start, ROWS, WIDTH, 0, WIDTH)
    token = (start + tl.arange(0, ROWS))[:, None].to(tl.int64)
    # No thread may overwrite rows that another thread has not read yet.
    tl.debug_barrier()
    if other < blocks:
        whole += (head * blocks + other) * WIDTH * WIDTH
    for first in range(0, WIDTH, PART):
        at = token * WIDTH + first + tl.arange(0, PART)[None, :]
        d_part = tl.load(d_at_border + head * tokens * WIDTH + at)
        if other < blocks:
            d_part += times_part(tile, whole, first, is_query == 1, WIDTH, PART, PRECISION)
        tl.store(at_head + at, d_part)
