"""Many new tokens of PaTH: their softmax over the cached keys before the last flush.

These keys have been transported to the flush, so that a query x which has passed all reflections
since (`forward.py`) has the scores

    S = x Kᵀ,    (o_p, λ_p) = softmax over part p of the keys                   (`read_cached`)

with no reflection between tiles. With the (o, λ) of the later keys, as one more part,

    λ = log Σ_p e^{λ_p},    o = Σ_p e^{λ_p − λ} o_p                              (`merge_parts`).

The queries of a key/value head, `t` of each of its query heads, are the rows of tiles: a part of
the cache is read once for each tile of rows. Grids: one program per tile of rows, key/value head
and part (`read_cached`); per tile of queries and query head (`merge_parts`). t c (d + e) products
per query head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.softmax.score_tiles import mean_and_log, with_tile
from precondattn_triton.tiles import (
    LOG2_E,
    is_token,
    load_channels,
    load_tile,
    start_of,
    store_channels,
    tile_of_program,
)


@triton.jit(do_not_specialize=["count"])
def read_cached(
    recent, keys, values, lengths, valid, outs, logs,
    count, heads, queries, t, per_part, scale, window, flush,
    D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, TWO_PARTS: tl.constexpr,
):  # fmt: skip
    """o_p (b n, parts, rows, E) and λ_p (b n, parts, rows) of one part p.

    Rows of `recent` are x, then o.
    """
    tile, batch, head = tile_of_program(tl.cdiv(queries, ROWS), heads)
    part, parts = tl.program_id(1), tl.num_programs(1)
    rows = tile * ROWS + tl.arange(0, ROWS)
    is_row = rows < queries
    index = batch * heads + head
    recent += index * queries * (PADDED_D + PADDED_E)
    x = load_tile(recent, rows, is_row, PADDED_D + PADDED_E, PADDED_D, PADDED_D)
    FACTOR: tl.constexpr = (
        tl.bfloat16 if values.array.dtype.element_ty == tl.bfloat16 else tl.float32
    )
    x = (x * (scale * LOG2_E)).to(FACTOR)
    key_start, value_start = start_of(keys, batch, head), start_of(values, batch, head)
    length = tl.load(lengths + batch)
    position = length + rows % t
    low, high = part * per_part, length - length % flush
    if window is not None:
        first = tl.min(tl.where(is_row, position, length + t)) - window + 1
        low = tl.maximum(low, first // COLUMNS * COLUMNS)
    high = tl.minimum(tl.minimum((part + 1) * per_part, high), count)

    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, PADDED_E), tl.float32)
    for start in range(low, high, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        is_key = (columns < high) & is_token(valid, batch, columns, count)
        key_tile = load_channels(keys, key_start, columns, is_key, D, PADDED_D).to(FACTOR)
        scores = tl.dot(x, tl.trans(key_tile), input_precision=PRECISION)
        mask = is_key[None, :]
        if window is not None:
            mask = mask & (columns[None, :] > position[:, None] - window)
        scores = tl.where(mask, scores, float("-inf"))
        value_tile = load_channels(values, value_start, columns, is_key, E, PADDED_E).to(FACTOR)
        largest, total, acc = with_tile(
            largest, total, acc, scores, value_tile, PRECISION, TWO_PARTS
        )
    o, part_logs = mean_and_log(largest, total, acc, is_row)
    at = (index * parts + part) * queries
    tl.store(logs + at + rows, part_logs, mask=is_row)
    store_channels(outs + at * PADDED_E, rows, is_row, PADDED_E, o, PADDED_E)


@triton.jit(do_not_specialize=["parts"])
def merge_parts(
    recent, recent_logs, outs, logs, q_valid, out,
    t, h, n, parts,
    E: tl.constexpr, PADDED_D: tl.constexpr, PADDED_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """o (b, t, h, e) from o and λ of the later keys, and from those of all parts.

    Rows of `recent` (b, h, t, D + E) are x, then o.
    """
    tile, batch, head = tile_of_program(tl.cdiv(t, ROWS), h)
    rows = tile * ROWS + tl.arange(0, ROWS)
    is_row = is_token(q_valid, batch, rows, t)
    group = h // n
    at_head = (batch * h + head) * t
    largest = tl.load(recent_logs + at_head + rows, mask=is_row, other=float("inf")) * LOG2_E
    # λ is ∞ where a row has no key in a part, which then counts for nothing.
    largest = tl.where(largest == float("inf"), float("-inf"), largest)
    total = tl.where(largest == float("-inf"), 0.0, 1.0)
    recent += at_head * (PADDED_D + PADDED_E) + PADDED_D
    acc = load_tile(recent, rows, is_row, PADDED_D + PADDED_E, PADDED_E, PADDED_E)
    for part in range(0, parts):
        at = ((batch * n + head // group) * parts + part) * (group * t) + head % group * t
        part_log = tl.load(logs + at + rows, mask=is_row, other=float("inf")) * LOG2_E
        part_log = tl.where(part_log == float("inf"), float("-inf"), part_log)
        higher = tl.maximum(largest, part_log)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, weight = tl.exp2(largest - base), tl.exp2(part_log - base)
        part_out = load_tile(outs + at * PADDED_E, rows, is_row, PADDED_E, PADDED_E, PADDED_E)
        acc = acc * shrink[:, None] + part_out * weight[:, None]
        total = total * shrink + weight
        largest = higher
    o, _ = mean_and_log(largest, total, acc, is_row)
    store_channels(out + (batch * t * h + head) * E, rows, rows < t, h * E, o, E)
