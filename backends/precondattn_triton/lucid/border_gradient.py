"""The gradient of the scores of LUCID's keys in PaTH's metric (`borders.py`).

    dS_ab = −s (dv_a · y_b) Φ_ab    for b before a

Across the borders of one level, with z the row of a token at the border (`borders.py`) and o the
tokens on the other side,

    at_border        dz_a = Σ_o dS_ao z_o    (o before a),    Σ_o dS_oa z_o    (o after a),

and within a chunk `within` stores dS itself. Grid: one program per tile of tokens and head. It
loops over the tokens of the same segments on the other side, or over those of the chunk. No two
programs add to the same element, so the result is deterministic. All levels together take 2 d + e
products per pair of tokens, twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.lucid.gradient import products, weighted_keys
from precondattn_triton.lucid.tiles import reach, weights
from precondattn_triton.tiles import load_rows, start_of


@triton.jit
def one_side(
    left, left_start, right, right_start, keys, segments, head, tokens, a_start, low, high,
    s, width, scale, shift,
    TILE: tl.constexpr, COLUMNS: tl.constexpr,
    KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ_b (left_a · right_b) Φ_ab z_b over the tokens b from `low` to `high`."""
    a_keys = load_rows(keys, head, tokens, a_start, TILE, KEY_WIDTH, 0, KEY_WIDTH)
    total = tl.zeros((TILE, KEY_WIDTH), tl.float32)
    IS_HALF: tl.constexpr = (
        keys.dtype.element_ty == tl.float16 and left.array.dtype.element_ty == tl.bfloat16
    )
    if segments is not None:
        begin, end = reach(segments, tokens, a_start, TILE)
        low = tl.maximum(low, begin // COLUMNS * COLUMNS)
        high = tl.minimum(high, end)
    for b_start in range(low, high, COLUMNS):
        g = products(
            left, left_start, right, right_start, a_start, b_start, s, width,
            TILE, COLUMNS, WIDTH, CHUNKS, PRECISION,
        )  # fmt: skip
        total += weighted_keys(
            g, a_keys, keys, segments, head, tokens, a_start, b_start,
            scale, shift, COLUMNS, KEY_WIDTH, PRECISION, IS_HALF,
        )  # fmt: skip
    return total


@triton.jit
def at_border(
    keys, segments, y, d_v, d_keys,
    s, heads, tokens, width, half, scale, shift, score_scale,
    TILE: tl.constexpr, COLUMNS: tl.constexpr,
    KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of dz (m, T, D); y and dv (b, s, n, e) are 0 for invalid tokens."""
    head = tl.program_id(1).to(tl.int64)
    b, n = head // heads, head % heads
    if segments is not None:
        segments += b * 2 * tokens
    y_start, d_v_start = start_of(y, b, n), start_of(d_v, b, n)
    a_start = tl.program_id(0) * TILE
    block = a_start // half
    if block % 2 == 1:
        total = one_side(
            d_v, d_v_start, y, y_start, keys, segments, head, tokens, a_start,
            (block - 1) * half, block * half, s, width, scale, shift,
            TILE, COLUMNS, KEY_WIDTH, WIDTH, CHUNKS, PRECISION,
        )  # fmt: skip
    else:
        end = tl.minimum((block + 2) * half, s)
        total = one_side(
            y, y_start, d_v, d_v_start, keys, segments, head, tokens, a_start,
            (block + 1) * half, end, s, width, scale, shift,
            TILE, COLUMNS, KEY_WIDTH, WIDTH, CHUNKS, PRECISION,
        )  # fmt: skip
    token = (head * tokens + a_start + tl.arange(0, TILE))[:, None]
    at = d_keys + token * KEY_WIDTH + tl.arange(0, KEY_WIDTH)[None, :]
    tl.store(at, -score_scale * total)


@triton.jit
def within(
    chunk_scores, segments, y, d_v, d_chunk_scores,
    s, heads, tokens, width, scale, shift, score_scale,
    TILE: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dS (m, T, C) of a tile of tokens and all tokens of their chunk; strictly lower triangular."""
    head = tl.program_id(1).to(tl.int64)
    b, n = head // heads, head % heads
    if segments is not None:
        segments += b * 2 * tokens
    y_start, d_v_start = start_of(y, b, n), start_of(d_v, b, n)
    a_start = tl.program_id(0) * TILE
    a = a_start + tl.arange(0, TILE)
    begin = a_start // CHUNK * CHUNK
    for column in range(0, CHUNK, COLUMNS):
        b_start = begin + column
        g = products(
            d_v, d_v_start, y, y_start, a_start, b_start, s, width,
            TILE, COLUMNS, WIDTH, CHUNKS, PRECISION,
        )  # fmt: skip
        scores = load_rows(chunk_scores, head, tokens, a_start, TILE, COLUMNS, column, CHUNK)
        d_tile = weights(scores, segments, a_start, b_start, scale, shift)
        is_before = a[:, None] > (b_start + tl.arange(0, COLUMNS))[None, :]
        d_tile = tl.where(is_before, -score_scale * g * d_tile, 0.0)
        at = d_chunk_scores + (head * tokens + a)[:, None] * CHUNK + column
        tl.store(at + tl.arange(0, COLUMNS)[None, :], d_tile)
