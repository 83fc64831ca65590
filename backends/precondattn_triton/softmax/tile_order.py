"""The order of a grid's programs: in a causal call, those with the most work begin first.

A causal tile of queries has more keys the later it is, and a tile of keys more queries the earlier.
If heads follow one another, the last head's longest programs begin when few are left. So the tiles
of several heads, 256 in all, are ordered by their length. With more heads at a time, fewer programs
would read the same keys while these are in the cache.

In units of the mean load of 132 multiprocessors, the last program of 16 heads ends at (list
scheduling, tiles of 128 tokens, each program as long as its number of tiles plus 1/2):

    tokens                         2,048   4,096   8,192   32,768
    heads one after another        1.60    1.27    1.12    1.00
    the same, shortest first       1.63    1.31    1.16    1.03
    256 tiles together             1.03    1.00    1.00    1.00
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.tiles import is_token, tile_of_program


@triton.jit
def longest_first(tiles, heads, CAUSAL: tl.constexpr):
    """This program's rank in its head, 0 for the most work, its batch and its head."""
    program = tl.program_id(0)
    rank, head = program % tiles, program // tiles
    if CAUSAL:
        heads_together = tl.maximum(256 // tiles, 1)
        first = program // (tiles * heads_together) * heads_together
        program -= first * tiles
        heads_together = tl.minimum(heads_together, tl.num_programs(0) // tiles - first)
        rank, head = program // heads_together, first + program % heads_together
    return rank, (head // heads).to(tl.int64), (head % heads).to(tl.int64)


@triton.jit
def rows_of_program(
    masks, sizes, CAUSAL: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr = 1
):
    """This program's tile of queries, its part of PARTS, its batch, head and key/value head, and
    the queries and whether they exist and are valid."""
    tiles = tl.cdiv(sizes.t, ROWS)
    rank, batch, head = longest_first(tiles * PARTS, sizes.h, CAUSAL)
    tile = tiles - 1 - rank // PARTS
    rows = tile * ROWS + tl.arange(0, ROWS)
    is_row = is_token(masks.q_valid, batch, rows, sizes.t)
    return tile, rank % PARTS, batch, head, head // (sizes.h // sizes.n), rows, is_row


@triton.jit
def keys_of_program(
    masks, sizes, CAUSAL: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr = 1
):
    """This program's tile of keys, its part of PARTS, its batch and key/value head, and the keys
    and whether they exist and are valid."""
    rank, batch, kv = longest_first(tl.cdiv(sizes.s, ROWS) * PARTS, sizes.n, CAUSAL)
    keys = rank // PARTS * ROWS + tl.arange(0, ROWS)
    is_key = is_token(masks.k_valid, batch, keys, sizes.s)
    return rank // PARTS, rank % PARTS, batch, kv, keys, is_key


@triton.jit
def bias_tile_of_program(t, s, heads, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """This program's tile of queries, the first of its keys, and the first batch and head that have
    the bias. `heads` is the number of different heads of the bias."""
    across = tl.cdiv(s, COLUMNS)
    pair, batch, head = tile_of_program(tl.cdiv(t, ROWS) * across, heads)
    return pair // across, pair % across * COLUMNS, batch, head
