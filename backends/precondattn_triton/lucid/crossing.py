"""Rows that cross the borders of a level, and gradients that come back (`borders.py`).

A level has blocks of `half` tokens, and a border in the middle of every two. A row of the second
block is a query x, one of the first a key κ; with P of the other block, of its product of
reflections,

    cross         z = x,    x ← x P        dx ← dx Pᵀ + dz    come back
                  z = κ,    κ ← κ Pᵀ       dκ ← dκ P + dz

Where the other block is not whole, nothing has to cross: the sequence ends there. Rows are float32,
(2, m, T, D): κ, then x; z are operands of products (m, T, D), and dz is float32 again.

Grid: tiles of rows × heads. 2 D² products a token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.tiles import load_rows

PART = 32
"""Channels of a product that a program makes at once."""


@triton.jit
def other_side(rows, head, heads, tokens, start, half, WIDTH: tl.constexpr):
    """The head of x or κ that a tile belongs to, the block across, and whether it is x."""
    block = start // half
    is_query = block % 2
    return rows + (is_query * heads + head) * tokens * WIDTH, block + 1 - 2 * is_query, is_query


@triton.jit
def times_part(
    rows, whole, first, is_transposed,
    WIDTH: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Channels `first` … of rows P, or of rows Pᵀ."""
    every, part = tl.arange(0, WIDTH), first + tl.arange(0, PART)
    if is_transposed:
        factor = tl.trans(tl.load(whole + part[:, None] * WIDTH + every[None, :]))
    else:
        factor = tl.load(whole + every[:, None] * WIDTH + part[None, :])
    return tl.dot(rows, factor.to(tl.float32), input_precision=PRECISION)


@triton.jit
def cross(
    rows, whole, at_border, tokens, half, blocks,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of the level's `blocks` that are whole, (m, blocks, D, D) is P."""
    head, heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    start = tl.program_id(0) * ROWS
    own, other, is_query = other_side(rows, head, heads, tokens, start, half, WIDTH)
    tile = load_rows(own, 0, tokens, start, ROWS, WIDTH, 0, WIDTH)
    token = (start + tl.arange(0, ROWS))[:, None].to(tl.int64)
    at = at_border + (head * tokens + token) * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(at, tile.to(at_border.dtype.element_ty))
    if other < blocks:
        # Nobody may overwrite what another thread has yet to read.
        tl.debug_barrier()
        whole += (head * blocks + other) * WIDTH * WIDTH
        for first in range(0, WIDTH, PART):
            part = times_part(tile, whole, first, is_query == 0, WIDTH, PART, PRECISION)
            tl.store(own + token * WIDTH + first + tl.arange(0, PART)[None, :], part)


@triton.jit
def come_back(
    d_rows, whole, d_at_border, tokens, half, blocks,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of `cross`: what rows get behind it, and in front of it."""
    head, heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    start = tl.program_id(0) * ROWS
    own, other, is_query = other_side(d_rows, head, heads, tokens, start, half, WIDTH)
    tile = load_rows(own, 0, tokens, start, ROWS, WIDTH, 0, WIDTH)
    token = (start + tl.arange(0, ROWS))[:, None].to(tl.int64)
    # Nobody may overwrite what another thread has yet to read.
    tl.debug_barrier()
    if other < blocks:
        whole += (head * blocks + other) * WIDTH * WIDTH
    for first in range(0, WIDTH, PART):
        at = token * WIDTH + first + tl.arange(0, PART)[None, :]
        found = tl.load(d_at_border + head * tokens * WIDTH + at)
        if other < blocks:
            found += times_part(tile, whole, first, is_query == 1, WIDTH, PART, PRECISION)
        tl.store(own + at, found)
