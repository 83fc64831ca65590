"""The scores of PaTH's queries with the keys of their own chunk, backward.

With B = tril(q wᵀ), S = q kᵀ − B Z R, and y the gradient of the query as it leaves its chunk,
q − B U (`chunks.py`):

    scores    A = e^{s S − λ},    dS = s A ∘ (do vᵀ − D),
              dB = −tril(dS (Z R)ᵀ + y Uᵀ),    dq = y + dS k + dB w
    gather    dv += Aᵀ do,    dk = dSᵀ q,    dw = dBᵀ q,    dU = −Bᵀ y,    d(Z R) = −Bᵀ dS

A, dS, B and dB (b, h, t, C) go through memory: `scores` makes them, a tile of queries and a head at
a time, and `gather` sums over the queries of a chunk and over the query heads of a key/value head.
2 t C (3 d + e + C) and 2 t C (3 d + e + C) products a head.

Grids: tiles of queries × chunks × heads × sequences; parts of channels × chunks × kv heads ×
sequences, once for each of the five.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.path.chunks import rows_of
from precondattn_triton.path.forward import path_visible
from precondattn_triton.softmax.score_tiles import in_two_parts, load_logs
from precondattn_triton.tiles import (
    LOG2_E,
    addresses,
    is_token,
    load_tile,
    store_tile,
    tile_of_program,
)


@triton.jit
def part_of(
    start, tokens, is_there, token_stride, first, channel_stride,
    WIDTH: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Channels `first` … of tokens (tokens, PART); 0 where one is not there."""
    channels = first + tl.arange(0, PART)
    at = addresses(start, tokens, token_stride, channels, channel_stride)
    return tl.load(at, mask=is_there[:, None] & (channels < WIDTH)[None, :], other=0.0)


@triton.jit
def scores(
    q, k, v, w, u, zr, d_out, log_total, d_sum, own_y, d_q, a_out, d_s_out, b_out, d_b_out,
    q_valid, k_valid, q_segment, k_segment,
    scale, window, t, s, h, n, tokens,
    q_batch, q_token, q_head, q_channel, k_batch, k_token, k_head, k_channel,
    v_batch, v_token, v_head, v_channel, g_batch, g_token, g_head, g_channel,
    HAS_WINDOW: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_E: tl.constexpr, CHANNELS: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, batch, head = tile_of_program(tl.cdiv(s, CHUNK) * (CHUNK // ROWS), h)
    kv = head // (h // n)
    begin = tile * ROWS // CHUNK * CHUNK
    positions = tile * ROWS + tl.arange(0, ROWS)
    rows = positions - (s - t)
    is_there = (rows >= 0) & (rows < t)
    at = (batch * h + head) * t
    is_row = is_there & is_token(q_valid, batch, tl.maximum(rows, 0), t)
    logs = load_logs(log_total, at, rows, is_row)
    is_row = is_row & (logs < float("inf"))
    sums = tl.load(d_sum + at + rows, mask=is_row, other=0.0)
    FACTOR: tl.constexpr = w.dtype.element_ty
    columns = begin + tl.arange(0, CHUNK)
    is_key = is_token(k_valid, batch, columns, s)
    every = columns >= 0
    q += batch * q_batch + head * q_head
    k += batch * k_batch + kv * k_head
    v += batch * v_batch + kv * v_head
    w += (batch * n + kv) * tokens * PADDED_D
    u += (batch * n + kv) * tokens * PADDED_D
    d_out += batch * g_batch + head * g_head
    y_in = own_y + at * PADDED_D

    # A few channels at a time, read anew where they are needed again.
    own_s = tl.zeros((ROWS, CHUNK), tl.float32)
    b = tl.zeros((ROWS, CHUNK), tl.float32)
    D_PART: tl.constexpr = CHANNELS if CHANNELS < PADDED_D else PADDED_D
    for first in range(0, PADDED_D, D_PART):
        x = part_of(q, rows, is_row, q_token, first, q_channel, D, D_PART).to(FACTOR)
        its = part_of(k, columns, is_key, k_token, first, k_channel, D, D_PART).to(FACTOR)
        own_s = tl.dot(x, tl.trans(its), own_s, input_precision=PRECISION)
        its = part_of(w, columns, every, PADDED_D, first, 1, PADDED_D, D_PART)
        b = tl.dot(x, tl.trans(its), b, input_precision=PRECISION)
    is_behind = columns[None, :] <= positions[:, None]
    left = tl.where(is_behind, b, 0.0).to(FACTOR)
    zr_tile = rows_of(zr, batch * n + kv, tokens, begin, CHUNK, CHUNK)
    own_s -= tl.dot(left, zr_tile, input_precision=PRECISION)
    seen = path_visible(
        tl.maximum(rows, 0)[:, None], columns[None, :], is_key[None, :], batch, t, s,
        q_segment, k_segment, window, HAS_WINDOW,
    )  # fmt: skip
    own_s = tl.where(seen, own_s * (scale * LOG2_E), float("-inf"))
    a = tl.exp2(own_s - logs[:, None])
    d_a = tl.zeros((ROWS, CHUNK), tl.float32)
    E_PART: tl.constexpr = CHANNELS if CHANNELS < PADDED_E else PADDED_E
    for first in range(0, PADDED_E, E_PART):
        d_o = part_of(d_out, rows, is_row, g_token, first, g_channel, E, E_PART).to(FACTOR)
        its = part_of(v, columns, is_key, v_token, first, v_channel, E, E_PART).to(FACTOR)
        d_a = tl.dot(d_o, tl.trans(its), d_a, input_precision=PRECISION)
    d_scores = a * (d_a - sums[:, None]) * scale
    d_s = d_scores.to(FACTOR)
    d_b = tl.dot(d_s, tl.trans(zr_tile), input_precision=PRECISION)
    for first in range(0, PADDED_D, D_PART):
        y = part_of(y_in, rows, is_there, PADDED_D, first, 1, PADDED_D, D_PART).to(FACTOR)
        its = part_of(u, columns, every, PADDED_D, first, 1, PADDED_D, D_PART)
        d_b = tl.dot(y, tl.trans(its), d_b, input_precision=PRECISION)
    d_left = tl.where(is_behind, -d_b, 0.0).to(FACTOR)
    store_tile(a_out + at * CHUNK, rows, is_there, CHUNK, a, CHUNK)
    store_tile(d_s_out + at * CHUNK, rows, is_there, CHUNK, d_s, CHUNK)
    store_tile(b_out + at * CHUNK, rows, is_there, CHUNK, left, CHUNK)
    store_tile(d_b_out + at * CHUNK, rows, is_there, CHUNK, d_left, CHUNK)
    d_q += (batch * t * h + head) * D
    for first in range(0, PADDED_D, D_PART):
        y = part_of(y_in, rows, is_there, PADDED_D, first, 1, PADDED_D, D_PART)
        its = part_of(w, columns, every, PADDED_D, first, 1, PADDED_D, D_PART)
        y = tl.dot(d_left, its, y, input_precision=PRECISION)
        its = part_of(k, columns, is_key, k_token, first, k_channel, D, D_PART).to(FACTOR)
        y = in_two_parts(d_scores, its, y, PRECISION)
        channels = first + tl.arange(0, D_PART)
        mask = is_there[:, None] & (channels < D)[None, :]
        at_y = addresses(d_q, rows, h * D, channels, 1)
        tl.store(at_y, y.to(d_q.dtype.element_ty), mask=mask)


@triton.jit
def gather(
    left, right, out, q_valid,
    sign, t, s, h, n, tokens,
    r_batch, r_token, r_head, r_channel,
    IS_SUM: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, PART: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = PADDED // PART
    chunk_and_part, batch, kv = tile_of_program(tl.cdiv(s, CHUNK) * PARTS, n)
    begin = chunk_and_part // PARTS * CHUNK
    channels = chunk_and_part % PARTS * PART + tl.arange(0, PART)
    FACTOR: tl.constexpr = left.dtype.element_ty
    acc = tl.zeros((CHUNK, PART), tl.float32)
    for step in range(0, h // n * (CHUNK // ROWS)):
        head = kv * (h // n) + step // (CHUNK // ROWS)
        rows = begin - (s - t) + step % (CHUNK // ROWS) * ROWS + tl.arange(0, ROWS)
        is_there = (rows >= 0) & (rows < t)
        is_row = is_there & is_token(q_valid, batch, tl.maximum(rows, 0), t)
        start = left + (batch * h + head) * t * CHUNK
        weights = load_tile(start, rows, is_there, CHUNK, 1, CHUNK, CHUNK)
        at = addresses(right + batch * r_batch + head * r_head, rows, r_token, channels, r_channel)
        mask = is_row[:, None] & (channels < WIDTH)[None, :]
        its = tl.load(at, mask=mask, other=0.0).to(FACTOR)
        acc = tl.dot(tl.trans(weights), its, acc, input_precision=PRECISION)
    at = ((batch * n + kv) * tokens + begin + tl.arange(0, CHUNK))[:, None] * PADDED
    at = out + at + channels[None, :]
    acc *= sign
    if IS_SUM:
        acc += tl.load(at)
    tl.store(at, acc)
