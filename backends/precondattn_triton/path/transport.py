"""PaTH's cache after many new tokens: its keys, transported to the new last flush.

The tokens since the old flush, with the new ones up to the new flush, are divided into blocks
(`blocks.py`), with the product P_b of a block's reflections and its keys K̂, which its own later
reflections have transported. With

    B_i = P_last … P_{i+1} P_i                                                   (`later_products`)

the keys of block i become K̂ B_{i+1}ᵀ, and the keys before the old flush K B_0ᵀ   (`transport`).
Tokens after the new flush reflect nothing here, so that their keys stay as they are. All is in
float32, since keys are rewritten again and again. Stored are B − I, as is P − I.

Grids: one program per block of rows of B and key/value head (`later_products`); per tile of keys
and key/value head (`transport`). 2 d² products per key and block, and 2 d² per key.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.path.blocks import matrix_of
from precondattn_triton.tiles import (
    load_channels,
    load_tile,
    start_of,
    store_channels,
    tile_of_program,
)

PART = 32
"""Channels of B at a time in `later_products`."""


@triton.jit
def later_products(
    corrections, products, heads, blocks,
    PADDED_D: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """B − I (b n, blocks, D, D) from P − I; rows of B depend on no other rows."""
    part, _, head = tile_of_program(PADDED_D // WIDTH, heads)
    columns, channels = tl.arange(0, PADDED_D), tl.arange(0, PART)
    at_rows = (part * WIDTH + tl.arange(0, WIDTH))[:, None] * PADDED_D
    for back in range(0, blocks):
        at = (head * blocks + blocks - 1 - back) * PADDED_D * PADDED_D
        product = tl.load(corrections + at + at_rows + columns[None, :])
        if back > 0:
            # All threads read what each has stored. (I + B)(I + C) = I + B + C + B C.
            tl.debug_barrier()
            later = products + at + PADDED_D * PADDED_D + at_rows
            product += tl.load(later + columns[None, :])
            for first in range(0, PADDED_D, PART):
                left = tl.load(later + first + channels[None, :])
                at_part = (first + channels)[:, None] * PADDED_D + columns[None, :]
                right = tl.load(corrections + at + at_part)
                product = tl.dot(left, right, product, input_precision=PRECISION)
        tl.store(products + at + at_rows + columns[None, :], product)


@triton.jit
def transport(
    keys, recent, products, lengths, out, new,
    count, heads, tokens, t, pending, flush, size, blocks,
    D: tl.constexpr, PADDED_D: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the cached keys to `out` (b, count, n, d), and those of new tokens to `new`.

    `recent` are K̂ (b n, T, D) of the last `pending` cached tokens and the t new ones. Those before
    the old flush, in a sequence that has fewer pending tokens, are not stored.
    """
    of_cache = tl.cdiv(count, ROWS)
    tile, batch, head = tile_of_program(of_cache + tl.cdiv(pending + t, ROWS), heads)
    index = batch * heads + head
    length = tl.load(lengths + batch)
    flushed = length - length % flush
    is_of_cache = tile < of_cache
    first = tl.where(is_of_cache, tile, tile - of_cache) * ROWS
    rows = first + tl.arange(0, ROWS)
    if is_of_cache:
        x = load_channels(keys, start_of(keys, batch, head), rows, rows < count, D, PADDED_D)
    else:
        start = recent + index * tokens * PADDED_D
        x = load_tile(start, rows, rows < pending + t, PADDED_D, PADDED_D, PADDED_D)
    matrix = tl.where(is_of_cache, 0, first // size + 1)
    if matrix < blocks:
        moved = tl.dot(
            x,
            tl.trans(matrix_of(products, index * blocks + matrix, PADDED_D)),
            input_precision=PRECISION,
        )
        is_moved = (rows < flushed) | (matrix > 0)
        x = tl.where(is_moved[:, None], x + moved, x)
    out += (batch * count * heads + head) * D
    if is_of_cache:
        # Slots after the flush are those of pending tokens, or empty.
        is_kept = (rows < count) & ((rows < flushed) | (rows >= length))
        store_channels(out, rows, is_kept, heads * D, x, D)
    else:
        slots = length - pending + rows
        is_pending = (rows < pending) & (slots >= flushed)
        store_channels(out, slots, is_pending, heads * D, x, D)
        is_new = (rows >= pending) & (rows < pending + t)
        new += (batch * t * heads + head) * D
        store_channels(new, rows - pending, is_new, heads * D, x, D)
