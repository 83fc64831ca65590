"""The gradients of queries and λ of CCQ's query, and numbers for the gradient of keys.

With g = dq^c, and Σ symmetric,

    dλ = −q̄·(Σ g),    dq̄ = g − λ Σ g,    dq = (dq̄ − q̄ (q̄·dq̄)) / ‖q‖,

with Σ g computed like Σ q̄ in `contraction.py`. The gradient of keys needs, for each token, the
factor −λ / n of g in h / n, the means μ·q̄ and μ·h / n, and 1 / ‖q‖ (`moments_gradient.py`). Grid:
one program per chunk of one query head. 2 d² + 6 C d FLOPs per token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.ccq.contraction import centred, decay_and_counts
from precondattn_triton.ccq.row_lengths import inverse_length, no_squares, with_squares
from precondattn_triton.recurrence.chunk_tiles import (
    head_of,
    load_head,
    product,
    store_tokens,
)
from precondattn_triton.recurrence.decay_factors import numbers_of
from precondattn_triton.recurrence.moments import counted
from precondattn_triton.tiles import load_rows


@triton.jit
def contract_back(
    q, k, contraction, d_o, valid, gates, reading, moments, sums, counts, d_q, d_contraction,
    q_scale, weight, mean_q, mean_h, sizes, least,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write `d_q` (b, t, m, r, d), `d_contraction` (b, t, m, r), and four numbers (m r, T)."""
    heads, queries, s = sizes.heads, sizes.queries, sizes.s
    t, tokens, d = sizes.t, sizes.tokens, sizes.d
    query = tl.program_id(1).to(tl.int64)
    head, row = query // queries, query % queries
    chunk = tl.program_id(0)
    start, at = chunk * CHUNK, head * (tokens // CHUNK) + chunk
    position = tl.arange(0, CHUNK)
    q_start = head_of(q, head, heads) + row * q.row
    k_start = head_of(k, head, heads)
    d_o_start = head_of(d_o, head, heads) + row * d_o.row
    gradient = tl.zeros((CHUNK, WIDTH), tl.float32)
    pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
    query_pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
    with_sums = tl.zeros((CHUNK,), tl.float32)
    query_with_sums = tl.zeros((CHUNK,), tl.float32)
    size, square = no_squares(least, CHUNK)
    for c in range(0, WIDTH, KEYS):
        keys = load_head(k, k_start, start, c, s, d, CHUNK, KEYS)
        sum_of = tl.load(sums + at * WIDTH + c + tl.arange(0, KEYS))
        rows = load_head(q, q_start, start - s + t, c, t, d, CHUNK, KEYS)
        query_pairs += product(rows, tl.trans(keys), PRECISION)
        query_with_sums += tl.sum(rows.to(tl.float32) * sum_of[None, :], axis=1)
        size, square = with_squares(size, square, rows)
        rows = load_head(d_o, d_o_start, start - s + t, c, t, d, CHUNK, KEYS)
        pairs += product(rows, tl.trans(keys), PRECISION)
        with_sums += tl.sum(rows.to(tl.float32) * sum_of[None, :], axis=1)
        moment = load_rows(moments, at, WIDTH, c, KEYS, WIDTH, 0, WIDTH)
        gradient += product(rows, moment, PRECISION)
    is_counted = counted(valid, head, heads, start, s, CHUNK)
    decay, reads, number = decay_and_counts(
        gates, reading, counts, is_counted, head, tokens, start, CHUNK
    )
    numbers = query * tokens + start + position
    scale = inverse_length(size, square)
    tl.store(q_scale + numbers, scale)
    token = start - s + t + position.to(tl.int64)
    is_present = (token >= 0) & (token < t)
    strength = numbers_of(contraction, query, heads * queries, token, is_present)
    query_mean, _ = centred(
        query_pairs * scale[:, None], decay, query_with_sums * scale, reads, number
    )
    mean, pairs = centred(pairs, decay, with_sums, reads, number)
    tl.store(weight + numbers, -strength / number)
    tl.store(mean_q + numbers, query_mean)
    tl.store(mean_h + numbers, -strength / number * mean)
    sum_of = tl.load(sums + at * WIDTH + tl.arange(0, WIDTH))
    gradient = gradient * reads[:, None] - (reads * mean)[:, None] * sum_of[None, :]
    keys = load_head(k, k_start, start, 0, s, d, CHUNK, WIDTH)
    gradient += product(pairs.to(moments.dtype.element_ty), keys, PRECISION)
    gradient /= number[:, None]
    rows = load_head(q, q_start, start - s + t, 0, t, d, CHUNK, WIDTH).to(tl.float32)
    rows *= scale[:, None]
    query_at = (head // heads * t * heads + head % heads) * queries + row
    d_strength = -tl.sum(rows * gradient, axis=1)
    tl.store(d_contraction + query_at + token * heads * queries, d_strength, mask=is_present)
    cotangent = load_head(d_o, d_o_start, start - s + t, 0, t, d, CHUNK, WIDTH).to(tl.float32)
    gradient = cotangent - strength[:, None] * gradient
    gradient -= rows * tl.sum(rows * gradient, axis=1)[:, None]
    gradient *= scale[:, None]
    store_tokens(d_q + query_at * d, start - s + t, 0, t, d, heads * queries * d, gradient)
