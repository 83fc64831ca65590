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

import triton
import triton.language as tl

from precondattn_triton.decoding import query_rows
from precondattn_triton.softmax.score_tiles import mean_and_log


@triton.jit
def row_of(start, width, stride, is_present, WIDTH: tl.constexpr):
    """The channels (WIDTH) of one token, float32; 0 if it is not present."""
    channel = tl.arange(0, WIDTH)
    mask = (channel < width) & is_present
    return tl.load(start + channel.to(tl.int64) * stride, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def reflected(x, direction, strength):
    """x − β (x wᵀ) w, for rows x."""
    along = tl.sum(x * direction[None, :], 1) * strength
    return x - along[:, None] * direction[None, :]


@triton.jit
def recent(
    q, k, v, w, beta, keys, values, pending_w, pending_beta, lengths, valid, new_valid, x_out,
    totals, maxima, sums,
    heads, group, d, e, parts, scale, window, flush,
    q_b, q_h, q_d, k_b, k_n, k_d, v_b, v_n, v_e, w_b, w_n, w_d, beta_b, beta_n,
    key_b, key_c, key_n, key_d, value_b, value_c, value_n, value_e,
    pw_b, pw_m, pw_n, pw_d, pb_b, pb_m, pb_n, valid_b, new_b,
    HAS_VALID: tl.constexpr, HAS_WINDOW: tl.constexpr,
    ROWS: tl.constexpr, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The keys since the last flush, with the new one; stored as the first part."""
    head = tl.program_id(0).to(tl.int64)
    b, n = head // heads, head % heads
    row, channel = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    length = tl.load(lengths + b)
    pending = length % flush
    x = query_rows(q, head, heads, group, d, q_b, q_h, q_d, ROWS, KEY_WIDTH)
    is_read = length >= 0
    if HAS_VALID:
        is_read = tl.load(new_valid + b * new_b) != 0
    key = row_of(k + b * k_b + n * k_n, d, k_d, is_read, KEY_WIDTH)
    largest = tl.where(is_read, tl.sum(x * key[None, :], 1) * scale, float("-inf"))
    total = tl.zeros((ROWS,), tl.float32) + tl.where(is_read, 1.0, 0.0)
    value = row_of(v + b * v_b + n * v_n, e, v_e, is_read, WIDTH)
    acc = tl.zeros((ROWS, WIDTH), tl.float32) + value[None, :]
    direction = row_of(w + b * w_b + n * w_n, d, w_d, True, KEY_WIDTH)
    strength = tl.load(beta + b * beta_b + n * beta_n).to(tl.float32)
    x = reflected(x, direction, strength)
    for back in range(0, pending):
        index = pending - 1 - back
        slot = length - 1 - back
        is_read = slot >= 0
        if HAS_VALID:
            is_read = tl.load(valid + b * valid_b + slot) != 0
        if HAS_WINDOW:
            is_read = is_read & (back + 1 < window)
        start = keys + b * key_b + n * key_n + slot * key_c
        key = row_of(start, d, key_d, is_read, KEY_WIDTH)
        score = tl.where(is_read, tl.sum(x * key[None, :], 1) * scale, float("-inf"))
        higher = tl.maximum(largest, score)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, p = tl.exp2(largest - base), tl.exp2(score - base)
        start = values + b * value_b + n * value_n + slot * value_c
        value = row_of(start, e, value_e, is_read, WIDTH)
        acc = acc * shrink[:, None] + p[:, None] * value[None, :]
        total = total * shrink + p
        largest = higher
        start = pending_w + b * pw_b + n * pw_n + index * pw_m
        direction = row_of(start, d, pw_d, True, KEY_WIDTH)
        strength = tl.load(pending_beta + b * pb_b + n * pb_n + index * pb_m).to(tl.float32)
        x = reflected(x, direction, strength)
    at = head * ROWS + row
    tl.store(x_out + at[:, None] * KEY_WIDTH + tl.arange(0, KEY_WIDTH)[None, :], x)
    at = head * parts * ROWS + row
    tl.store(maxima + at, largest)
    tl.store(sums + at, total)
    tl.store(totals + at[:, None] * WIDTH + channel[None, :], acc)


@triton.jit(do_not_specialize=["count"])
def flushed(
    x_in, keys, values, lengths, valid, totals, maxima, sums,
    count, heads, d, e, parts, per_part, scale, window, flush,
    key_b, key_c, key_n, key_d, value_b, value_c, value_n, value_e, valid_b,
    HAS_VALID: tl.constexpr, HAS_WINDOW: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One part of the keys before the last flush, of one key/value head."""
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, n = head // heads, head % heads
    row = tl.arange(0, ROWS)
    channel, key_channel = tl.arange(0, WIDTH), tl.arange(0, KEY_WIDTH)
    length = tl.load(lengths + b)
    end = length - length % flush
    x = tl.load(x_in + (head * ROWS + row)[:, None] * KEY_WIDTH + key_channel[None, :])

    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for low in range(part * per_part, tl.minimum((part + 1) * per_part, count), TOKENS):
        token = (low + tl.arange(0, TOKENS)).to(tl.int64)
        is_read = (token < count) & (token < end)
        if HAS_VALID:
            is_read = is_read & (tl.load(valid + b * valid_b + token, mask=is_read, other=0) != 0)
        if HAS_WINDOW:
            is_read = is_read & (length - token < window)
        at = keys + b * key_b + n * key_n + token[:, None] * key_c
        inside = is_read[:, None] & (key_channel < d)[None, :]
        key_tile = tl.load(at + key_channel.to(tl.int64)[None, :] * key_d, mask=inside, other=0.0)
        scores = tl.dot(x, tl.trans(key_tile.to(tl.float32)), input_precision=PRECISION) * scale
        scores = tl.where(is_read[None, :], scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, p = tl.exp2(largest - base), tl.exp2(scores - base[:, None])
        at = values + b * value_b + n * value_n + token[:, None] * value_c
        inside = is_read[:, None] & (channel < e)[None, :]
        value_tile = tl.load(at + channel.to(tl.int64)[None, :] * value_e, mask=inside, other=0.0)
        acc = tl.dot(p, value_tile.to(tl.float32), acc * shrink[:, None], input_precision=PRECISION)
        total = total * shrink + tl.sum(p, 1)
        largest = higher
    at = (head * parts + 1 + part) * ROWS + row
    tl.store(maxima + at, largest)
    tl.store(sums + at, total)
    tl.store(totals + at[:, None] * WIDTH + channel[None, :], acc)


@triton.jit(do_not_specialize=["parts"])
def merge(
    totals, maxima, sums, is_token, out,
    parts, heads, group, e, token_b,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write `out` (b, h, e) from the parts of a head."""
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
        base = tl.where(higher == float("-inf"), 0.0, higher)
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
    capacity, heads, d, flush,
    key_b, key_c, key_n, key_d, w_b, w_n, w_d, beta_b, beta_n,
    pw_b, pw_m, pw_n, pw_d, pb_b, pb_m, pb_n, token_b, out_b, out_c, out_n, out_d,
    TOKENS: tl.constexpr, KEY_WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy all cached keys; in sequences that are flushed now, transport them."""
    head = tl.program_id(1).to(tl.int64)
    b, n = head // heads, head % heads
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    channel = tl.arange(0, KEY_WIDTH).to(tl.int64)
    inside = (token < capacity)[:, None] & (channel < d)[None, :]
    at = keys + b * key_b + n * key_n + token[:, None] * key_c + channel[None, :] * key_d
    key_tile = tl.load(at, mask=inside, other=0.0)
    length = tl.load(lengths + b)
    is_flushed = (length + 1) % flush == 0
    if is_token is not None:
        is_flushed = is_flushed & (tl.load(is_token + b * token_b) != 0)
    if is_flushed:
        pending = length % flush
        for index in range(0, pending):
            start = pending_w + b * pw_b + n * pw_n + index * pw_m
            direction = row_of(start, d, pw_d, True, KEY_WIDTH)
            strength = tl.load(pending_beta + b * pb_b + n * pb_n + index * pb_m).to(tl.float32)
            # Among keys since the last flush, only those before this reflection.
            is_before = token < length - pending + index
            key_tile = tl.where(
                is_before[:, None], reflected(key_tile, direction, strength), key_tile
            )
        direction = row_of(w + b * w_b + n * w_n, d, w_d, True, KEY_WIDTH)
        strength = tl.load(beta + b * beta_b + n * beta_n).to(tl.float32)
        key_tile = tl.where(
            (token < length)[:, None], reflected(key_tile, direction, strength), key_tile
        )
    at = out + b * out_b + n * out_n + token[:, None] * out_c + channel[None, :] * out_d
    tl.store(at, key_tile, mask=inside)
