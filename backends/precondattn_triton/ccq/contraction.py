"""CCQ's query of every chunk, from the moments before it.

    q^c = q̄ − λ c,    c_i = Σ_i q̄_i = (q̄_i A_i − (μ_i·q̄_i) m_i) / n_i,    μ = m / n,

with A, m and n of `moments.py` up to and including token i. The keys of the same chunk need only
one more product, of centred pairs,

    c_i n_i = q̄_i A − (μ_i·q̄_i) m + Σ_j D_ij (q̄_i·k̄_j − μ_i·q̄_i) k̄_j,

where A and m are the moments before the chunk, or 0 if they are of another segment than token i,
and D_ij is 1 for the tokens j ≤ i of the same segment. Grid: one program per chunk of one query
head, with all channels: 2 d² + 4 C d FLOPs per token. It reads A once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.ccq.row_lengths import inverse_length, no_squares, with_squares
from precondattn_triton.recurrence.chunk_tiles import (
    head_of,
    load_head,
    pairs_of,
    product,
    store_tokens,
)
from precondattn_triton.recurrence.decay_factors import numbers_of
from precondattn_triton.recurrence.moments import counted
from precondattn_triton.tiles import load_rows


@triton.jit
def decay_and_counts(gates, reading, counts, is_counted, head, tokens, start, CHUNK: tl.constexpr):
    """D, whether each token reads the moments before the chunk (1 or 0), and n, at least 1."""
    first = head * tokens + start
    decay = pairs_of(gates, first, CHUNK, False)
    reads = tl.full((CHUNK,), 1.0, tl.float32)
    if reading is not None:
        reads = tl.load(reading + first + tl.arange(0, CHUNK))
    number = reads * tl.load(counts + head * (tokens // CHUNK) + start // CHUNK)
    number += tl.sum(decay * is_counted[None, :], axis=1)
    # n = 0 in rows before the first valid token.
    return decay, reads, tl.where(number > 0, number, 1.0)


@triton.jit
def centred(pairs, decay, with_sums, reads, number):
    """μ·x and the centred pairs x·k̄ − μ·x, from all pairs x·k̄ and from `with_sums`, x·m."""
    pairs *= decay
    mean = (tl.sum(pairs, axis=1) + reads * with_sums) / number
    return mean, pairs - mean[:, None] * decay


@triton.jit
def contract(
    q, k, contraction, valid, gates, reading, moments, sums, counts, o, sizes, least,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write q^c of one query per token to `o` (b, t, m, r, d). k has rows of length 1, q any.

    `least` is √ε of the lengths.
    """
    heads, queries, s = sizes.heads, sizes.queries, sizes.s
    t, tokens, d = sizes.t, sizes.tokens, sizes.d
    query = tl.program_id(1).to(tl.int64)
    head, row = query // queries, query % queries
    chunk = tl.program_id(0)
    start, at = chunk * CHUNK, head * (tokens // CHUNK) + chunk
    position = tl.arange(0, CHUNK)
    q_start = head_of(q, head, heads) + row * q.row
    k_start = head_of(k, head, heads)
    contracted = tl.zeros((CHUNK, WIDTH), tl.float32)
    pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
    with_sums = tl.zeros((CHUNK,), tl.float32)
    size, square = no_squares(least, CHUNK)
    for c in range(0, WIDTH, KEYS):
        query_rows = load_head(q, q_start, start - s + t, c, t, d, CHUNK, KEYS)
        keys = load_head(k, k_start, start, c, s, d, CHUNK, KEYS)
        pairs += product(query_rows, tl.trans(keys), PRECISION)
        moment = load_rows(moments, at, WIDTH, c, KEYS, WIDTH, 0, WIDTH)
        contracted += product(query_rows, moment, PRECISION)
        sum_of = tl.load(sums + at * WIDTH + c + tl.arange(0, KEYS))
        with_sums += tl.sum(query_rows.to(tl.float32) * sum_of[None, :], axis=1)
        size, square = with_squares(size, square, query_rows)
    scale = inverse_length(size, square)
    is_counted = counted(valid, head, heads, start, s, CHUNK)
    decay, reads, number = decay_and_counts(
        gates, reading, counts, is_counted, head, tokens, start, CHUNK
    )
    mean, pairs = centred(pairs * scale[:, None], decay, with_sums * scale, reads, number)
    contracted *= (reads * scale)[:, None]
    sum_of = tl.load(sums + at * WIDTH + tl.arange(0, WIDTH))
    contracted -= (reads * mean)[:, None] * sum_of[None, :]
    keys = load_head(k, k_start, start, 0, s, d, CHUNK, WIDTH)
    contracted += product(pairs.to(moments.dtype.element_ty), keys, PRECISION)
    token = start - s + t + position.to(tl.int64)
    is_present = (token >= 0) & (token < t)
    strength = numbers_of(contraction, query, heads * queries, token, is_present)
    query_rows = load_head(q, q_start, start - s + t, 0, t, d, CHUNK, WIDTH).to(tl.float32)
    contracted = query_rows * scale[:, None] - (strength / number)[:, None] * contracted
    o += ((head // heads * t * heads + head % heads) * queries + row) * d
    store_tokens(o, start - s + t, 0, t, d, heads * queries * d, contracted)
