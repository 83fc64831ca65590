"""A step of PaTH by one token: cached keys are read once, and rewritten only when flushed.

The cache holds the keys transported to the last multiple of `flush`, and the later (pending)
reflections w_m and β_m. For the queries of a key/value head, x ← q, and from the new token backward
over the tokens since the last flush,

    S_m = x k_mᵀ,    x ← x − β_m (x w_mᵀ) w_m                               (`recent`)
    S = x Kᵀ                                                                (`flushed`)

with softmax over all of them as in `softmax/score_tiles.py`. The parts are merged by

    o = Σ_p 2^{m_p − m} acc_p / Σ_p 2^{m_p − m} l_p,    m = max_p m_p       (`merge`).

When the length becomes a multiple of `flush`, every key is transported by the reflections after it,
k ← k − β_m (k w_mᵀ) w_m, in order of time (`flush_keys`). Products are in float32 (tf32 for half
precision), because memory limits a step, not products.

Grids: one program per key/value head (`recent`, `merge`); one per part of the keys and key/value
head (`flushed`); one per tile of keys and key/value head (`flush_keys`).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from precondattn_triton.softmax.score_tiles import mean_and_log
from precondattn_triton.softmax.step_rows import channels_of, finite, query_tile, slots_of
from precondattn_triton.tiles import addresses, start_of


class PathStepSizes(NamedTuple):
    """The sizes of a step, as an argument of a kernel."""

    heads: int
    group: int
    """The query heads of a key/value head"""
    d: int
    e: int
    scale: float
    """s, in units of log 2"""
    flush: int


@triton.jit
def reflected(x, w, beta, batch, token, head, width, WIDTH: tl.constexpr):
    """x − β (x wᵀ) w, for rows x and the reflection of a token, of `Heads`."""
    direction = channels_of(w, batch, token, head, width, True, WIDTH)
    strength = tl.load(start_of(beta, batch, head) + token * beta.token).to(tl.float32)
    along = tl.sum(x * direction[None, :], 1) * strength
    return x - along[:, None] * direction[None, :]


@triton.jit
def recent(
    q, k, v, w, beta, pending_w, pending_beta, keys, values, lengths, valid, new_valid, x_out,
    totals, maxima, sums, sizes, parts, window, valid_b, new_b,
    ROWS: tl.constexpr, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The keys since the last flush, with the new one; stored as the first part."""
    heads, d, e, scale = sizes.heads, sizes.d, sizes.e, sizes.scale
    head = tl.program_id(0).to(tl.int64)
    b, n = head // heads, head % heads
    row, channel = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    length = tl.load(lengths + b)
    pending = length % sizes.flush
    x = query_tile(q, head, heads, sizes.group, 1, d, ROWS, KEY_WIDTH)
    is_read = length >= 0
    if new_valid is not None:
        is_read = tl.load(new_valid + b * new_b) != 0
    key = channels_of(k, b, 0, n, d, is_read, KEY_WIDTH)
    largest = tl.where(is_read, tl.sum(x * key[None, :], 1) * scale, float("-inf"))
    total = tl.zeros((ROWS,), tl.float32) + tl.where(is_read, 1.0, 0.0)
    value = channels_of(v, b, 0, n, e, is_read, WIDTH)
    acc = tl.zeros((ROWS, WIDTH), tl.float32) + value[None, :]
    x = reflected(x, w, beta, b, 0, n, d, KEY_WIDTH)
    for back in range(0, pending):
        index = pending - 1 - back
        slot = length - 1 - back
        is_read = slot >= 0
        if valid is not None:
            is_read = tl.load(valid + b * valid_b + slot) != 0
        if window is not None:
            is_read = is_read & (back + 1 < window)
        key = channels_of(keys, b, slot, n, d, is_read, KEY_WIDTH)
        score = tl.where(is_read, tl.sum(x * key[None, :], 1) * scale, float("-inf"))
        higher = tl.maximum(largest, score)
        base = finite(higher)
        shrink, p = tl.exp2(largest - base), tl.exp2(score - base)
        value = channels_of(values, b, slot, n, e, is_read, WIDTH)
        acc = acc * shrink[:, None] + p[:, None] * value[None, :]
        total = total * shrink + p
        largest = higher
        x = reflected(x, pending_w, pending_beta, b, index, n, d, KEY_WIDTH)
    at = head * ROWS + row
    tl.store(x_out + at[:, None] * KEY_WIDTH + tl.arange(0, KEY_WIDTH)[None, :], x)
    at = head * parts * ROWS + row
    tl.store(maxima + at, largest)
    tl.store(sums + at, total)
    tl.store(totals + at[:, None] * WIDTH + channel[None, :], acc)


@triton.jit(do_not_specialize=["count"])
def flushed(
    x_in, keys, values, lengths, valid, totals, maxima, sums,
    count, sizes, parts, per_part, window, valid_b,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One part of the keys before the last flush, of one key/value head."""
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, n = head // sizes.heads, head % sizes.heads
    row = tl.arange(0, ROWS)
    channel, key_channel = tl.arange(0, WIDTH), tl.arange(0, KEY_WIDTH)
    length = tl.load(lengths + b)
    end = length - length % sizes.flush
    key_start, value_start = start_of(keys, b, n), start_of(values, b, n)
    x = tl.load(x_in + (head * ROWS + row)[:, None] * KEY_WIDTH + key_channel[None, :])

    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for low in range(part * per_part, tl.minimum((part + 1) * per_part, count), TOKENS):
        token = (low + tl.arange(0, TOKENS)).to(tl.int64)
        is_read = (token < count) & (token < end)
        if valid is not None:
            is_read = is_read & (tl.load(valid + b * valid_b + token, mask=is_read, other=0) != 0)
        if window is not None:
            is_read = is_read & (length - token < window)
        key_tile = slots_of(keys, key_start, token, is_read, sizes.d, KEY_WIDTH)
        scores = tl.dot(x, tl.trans(key_tile), input_precision=PRECISION) * sizes.scale
        scores = tl.where(is_read[None, :], scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        base = finite(higher)
        shrink, p = tl.exp2(largest - base), tl.exp2(scores - base[:, None])
        value_tile = slots_of(values, value_start, token, is_read, sizes.e, WIDTH)
        acc = tl.dot(p, value_tile, acc * shrink[:, None], input_precision=PRECISION)
        total = total * shrink + tl.sum(p, 1)
        largest = higher
    at = (head * parts + 1 + part) * ROWS + row
    tl.store(maxima + at, largest)
    tl.store(sums + at, total)
    tl.store(totals + at[:, None] * WIDTH + channel[None, :], acc)


@triton.jit(do_not_specialize=["parts"])
def merge(
    totals, maxima, sums, is_token, out, parts, sizes, token_b,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write `out` (b, h, e) from the parts of a head."""
    heads, group, e = sizes.heads, sizes.group, sizes.e
    head = tl.program_id(0).to(tl.int64)
    b, n = head // heads, head % heads
    row, channel = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for part in range(0, parts):
        at = (head * parts + part) * ROWS + row
        part_largest = tl.load(maxima + at)
        higher = tl.maximum(largest, part_largest)
        base = finite(higher)
        shrink, part_weight = tl.exp2(largest - base), tl.exp2(part_largest - base)
        part_acc = tl.load(totals + at[:, None] * WIDTH + channel[None, :])
        acc = acc * shrink[:, None] + part_acc * part_weight[:, None]
        total = total * shrink + tl.load(sums + at) * part_weight
        largest = higher
    is_row = row < group
    if is_token is not None:
        is_row = is_row & (tl.load(is_token + b * token_b) != 0)
    o, _ = mean_and_log(largest, total, acc, is_row)
    at = out + (b * heads * group + n * group + row[:, None]) * e + channel[None, :]
    tl.store(at, o.to(out.dtype.element_ty), mask=(row < group)[:, None] & (channel < e)[None, :])


@triton.jit
def flush_keys(
    keys, w, beta, pending_w, pending_beta, lengths, is_token, out,
    capacity, sizes, token_b,
    TOKENS: tl.constexpr, KEY_WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy all cached keys; in sequences that are flushed now, transport them."""
    heads, d, flush = sizes.heads, sizes.d, sizes.flush
    head = tl.program_id(1).to(tl.int64)
    b, n = head // heads, head % heads
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    channel = tl.arange(0, KEY_WIDTH)
    inside = (token < capacity)[:, None] & (channel < d)[None, :]
    at = addresses(start_of(keys, b, n), token, keys.token, channel, keys.channel)
    key_tile = tl.load(at, mask=inside, other=0.0)
    length = tl.load(lengths + b)
    is_flushed = (length + 1) % flush == 0
    if is_token is not None:
        is_flushed = is_flushed & (tl.load(is_token + b * token_b) != 0)
    if is_flushed:
        pending = length % flush
        for index in range(0, pending):
            # Among keys since the last flush, only those before this reflection.
            is_before = token < length - pending + index
            moved = reflected(key_tile, pending_w, pending_beta, b, index, n, d, KEY_WIDTH)
            key_tile = tl.where(is_before[:, None], moved, key_tile)
        moved = reflected(key_tile, w, beta, b, 0, n, d, KEY_WIDTH)
        key_tile = tl.where((token < length)[:, None], moved, key_tile)
    at = addresses(start_of(out, b, n), token, out.token, channel, out.channel)
    tl.store(at, key_tile, mask=inside)
