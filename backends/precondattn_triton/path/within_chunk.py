"""PaTH backward: the scores of queries with the keys of the same chunk.

With B = tril(q wᵀ), S = q kᵀ − B Z R, and y the gradient of the query as it leaves its chunk,
q − B U (`chunks.py`):

    scores    A = e^{s S − λ},    dS = s A ∘ (do vᵀ − D),
              dB = −tril(dS (Z R)ᵀ + y Uᵀ),    dq = y + dS k + dB w
    gather    dv += Aᵀ do,    dk = dSᵀ q,    dw = dBᵀ q,    dU = −Bᵀ y,    d(Z R) = −Bᵀ dS

A, dS, B and dB (b, h, t, C) are stored in memory: `scores` computes them, and `gather` sums over
the queries of a chunk and over the query heads of a key/value head. 2 t C (3 d + e + C) and
2 t C (3 d + e + C) products per head.

Grid of `scores`: one program per tile of queries, chunk, head and sequence. Grid of `gather`: one
program per block of channels, chunk, kv head and sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.path.chunks import rows_of, store_rows
from precondattn_triton.path.forward import path_may_attend
from precondattn_triton.softmax.score_tiles import add_product, load_logs
from precondattn_triton.tiles import (
    LOG2_E,
    is_token,
    load_channels,
    load_tile,
    start_of,
    store_channels,
    tile_of_program,
)


@triton.jit
def scores(
    q, k, v, w, u, zr, d_out, log_total, d_sum, chunk_y, d_q, a_out, d_s_out, b_out, d_b_out,
    masks, window, sizes, tokens,
    D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_E: tl.constexpr, CHANNELS: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, TWO_PARTS: tl.constexpr,
):  # fmt: skip
    t, s, h, n, scale = sizes.t, sizes.s, sizes.h, sizes.n, sizes.scale
    tile, batch, head = tile_of_program(tl.cdiv(s, CHUNK) * (CHUNK // ROWS), h)
    kv = head // (h // n)
    begin = tile * ROWS // CHUNK * CHUNK
    positions = tile * ROWS + tl.arange(0, ROWS)
    rows = positions - (s - t)
    is_present = (rows >= 0) & (rows < t)
    at = (batch * h + head) * t
    is_row = is_present & is_token(masks.q_valid, batch, tl.maximum(rows, 0), t)
    logs = load_logs(log_total, at, rows, is_row)
    is_row = is_row & (logs < float("inf"))
    sums = tl.load(d_sum + at + rows, mask=is_row, other=0.0)
    FACTOR: tl.constexpr = w.dtype.element_ty
    columns = begin + tl.arange(0, CHUNK)
    is_key = is_token(masks.k_valid, batch, columns, s)
    all_tokens = columns >= 0
    q_start, k_start = start_of(q, batch, head), start_of(k, batch, kv)
    v_start, g_start = start_of(v, batch, kv), start_of(d_out, batch, head)
    w += (batch * n + kv) * tokens * PADDED_D
    u += (batch * n + kv) * tokens * PADDED_D
    y_in = chunk_y + at * PADDED_D

    # A block of channels at a time; blocks are loaded again when they are needed again.
    logits = tl.zeros((ROWS, CHUNK), tl.float32)
    b = tl.zeros((ROWS, CHUNK), tl.float32)
    D_PART: tl.constexpr = CHANNELS if CHANNELS < PADDED_D else PADDED_D
    for first in range(0, PADDED_D, D_PART):
        x = load_channels(q, q_start, rows, is_row, D, D_PART, first).to(FACTOR)
        part = load_channels(k, k_start, columns, is_key, D, D_PART, first).to(FACTOR)
        logits = tl.dot(x, tl.trans(part), logits, input_precision=PRECISION)
        part = load_tile(w, columns, all_tokens, PADDED_D, PADDED_D, D_PART, first)
        b = tl.dot(x, tl.trans(part), b, input_precision=PRECISION)
    is_before = columns[None, :] <= positions[:, None]
    left = tl.where(is_before, b, 0.0).to(FACTOR)
    zr_tile = rows_of(zr, batch * n + kv, tokens, begin, CHUNK, CHUNK)
    logits -= tl.dot(left, zr_tile, input_precision=PRECISION)
    may_read = path_may_attend(
        tl.maximum(rows, 0)[:, None], columns[None, :], is_key[None, :], batch, masks, window, sizes
    )
    logits = tl.where(may_read, logits * (scale * LOG2_E), float("-inf"))
    a = tl.exp2(logits - logs[:, None])
    d_a = tl.zeros((ROWS, CHUNK), tl.float32)
    E_PART: tl.constexpr = CHANNELS if CHANNELS < PADDED_E else PADDED_E
    for first in range(0, PADDED_E, E_PART):
        d_o = load_channels(d_out, g_start, rows, is_row, E, E_PART, first).to(FACTOR)
        part = load_channels(v, v_start, columns, is_key, E, E_PART, first).to(FACTOR)
        d_a = tl.dot(d_o, tl.trans(part), d_a, input_precision=PRECISION)
    d_scores = a * (d_a - sums[:, None]) * scale
    d_s = d_scores.to(FACTOR)
    d_b = tl.dot(d_s, tl.trans(zr_tile), input_precision=PRECISION)
    for first in range(0, PADDED_D, D_PART):
        y = load_tile(y_in, rows, is_present, PADDED_D, PADDED_D, D_PART, first).to(FACTOR)
        part = load_tile(u, columns, all_tokens, PADDED_D, PADDED_D, D_PART, first)
        d_b = tl.dot(y, tl.trans(part), d_b, input_precision=PRECISION)
    d_left = tl.where(is_before, -d_b, 0.0).to(FACTOR)
    store_channels(a_out + at * CHUNK, rows, is_present, CHUNK, a, CHUNK)
    store_channels(d_s_out + at * CHUNK, rows, is_present, CHUNK, d_s, CHUNK)
    store_channels(b_out + at * CHUNK, rows, is_present, CHUNK, left, CHUNK)
    store_channels(d_b_out + at * CHUNK, rows, is_present, CHUNK, d_left, CHUNK)
    d_q += (batch * t * h + head) * D
    for first in range(0, PADDED_D, D_PART):
        y = load_tile(y_in, rows, is_present, PADDED_D, PADDED_D, D_PART, first)
        part = load_tile(w, columns, all_tokens, PADDED_D, PADDED_D, D_PART, first)
        y = tl.dot(d_left, part, y, input_precision=PRECISION)
        part = load_channels(k, k_start, columns, is_key, D, D_PART, first).to(FACTOR)
        y = add_product(d_scores, part, y, PRECISION, TWO_PARTS)
        store_channels(d_q, rows, is_present, h * D, y, D, first)


@triton.jit
def gather(
    a_in, d_s_in, b_in, d_b_in, q, d_out, chunk_y, d_v, d_k, d_w, d_u, d_zr,
    q_valid, sizes, tokens,
    D: tl.constexpr, E: tl.constexpr, PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    D_PART: tl.constexpr, E_PART: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    t, s, h, n = sizes.t, sizes.s, sizes.h, sizes.n
    chunk_and_part, batch, kv = tile_of_program(tl.cdiv(s, CHUNK) * PARTS, n)
    begin, part = chunk_and_part // PARTS * CHUNK, chunk_and_part % PARTS
    d_first, e_first = part * D_PART, part * E_PART
    FACTOR: tl.constexpr = a_in.dtype.element_ty
    v_acc = tl.zeros((CHUNK, E_PART), tl.float32)
    k_acc = tl.zeros((CHUNK, D_PART), tl.float32)
    w_acc = tl.zeros((CHUNK, D_PART), tl.float32)
    u_acc = tl.zeros((CHUNK, D_PART), tl.float32)
    zr_acc = tl.zeros((CHUNK, CHUNK), tl.float32)
    for step in range(0, h // n * (CHUNK // ROWS)):
        head = kv * (h // n) + step // (CHUNK // ROWS)
        rows = begin - (s - t) + step % (CHUNK // ROWS) * ROWS + tl.arange(0, ROWS)
        is_present = (rows >= 0) & (rows < t)
        is_row = is_present & is_token(q_valid, batch, tl.maximum(rows, 0), t)
        at = (batch * h + head) * t
        d_o = load_channels(
            d_out, start_of(d_out, batch, head), rows, is_row, E, E_PART, e_first
        ).to(FACTOR)
        a = load_tile(a_in + at * CHUNK, rows, is_present, CHUNK, CHUNK, CHUNK)
        v_acc = tl.dot(tl.trans(a), d_o, v_acc, input_precision=PRECISION)
        x = load_channels(q, start_of(q, batch, head), rows, is_row, D, D_PART, d_first)
        x = x.to(FACTOR)
        d_s = load_tile(d_s_in + at * CHUNK, rows, is_present, CHUNK, CHUNK, CHUNK)
        k_acc = tl.dot(tl.trans(d_s), x, k_acc, input_precision=PRECISION)
        d_b = load_tile(d_b_in + at * CHUNK, rows, is_present, CHUNK, CHUNK, CHUNK)
        w_acc = tl.dot(tl.trans(d_b), x, w_acc, input_precision=PRECISION)
        b = load_tile(b_in + at * CHUNK, rows, is_present, CHUNK, CHUNK, CHUNK)
        y_in = chunk_y + at * PADDED_D
        y = load_tile(y_in, rows, is_row, PADDED_D, PADDED_D, D_PART, d_first).to(FACTOR)
        u_acc = tl.dot(tl.trans(b), y, u_acc, input_precision=PRECISION)
        zr_acc = tl.dot(tl.trans(b), d_s, zr_acc, input_precision=PRECISION)
    index = batch * n + kv
    all_rows = begin + tl.arange(0, CHUNK)
    if e_first < PADDED_E:
        at_v = (index * tokens + all_rows)[:, None] * PADDED_E
        at_v = d_v + at_v + e_first + tl.arange(0, E_PART)[None, :]
        tl.store(at_v, v_acc + tl.load(at_v))
    if d_first < PADDED_D:
        at_d = (index * tokens + all_rows)[:, None] * PADDED_D
        at_d += d_first + tl.arange(0, D_PART)[None, :]
        tl.store(d_k + at_d, k_acc)
        tl.store(d_w + at_d, w_acc)
        tl.store(d_u + at_d, -u_acc)
    if part == 0:
        store_rows(d_zr, index, tokens, begin, -zr_acc)
