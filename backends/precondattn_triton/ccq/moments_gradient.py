"""The gradient of keys, of which CCQ's covariance is made.

With h = −λ dq^c, D as in `contraction.py`, and token i's n and μ,

    dk̄_j = Σ_{i≥j} D_ij ( (h_i / n_i) (q̄_i·k̄_j − μ_i·q̄_i) + q̄_i (h_i·k̄_j − μ_i·h_i) / n_i ),

and of the tokens behind j's chunk that is, with what is carried back from chunk to chunk,

    (B + Bᵀ) k̄_j − η,    B = Σ q̄_i h_iᵀ / n_i,    η = Σ (h_i (μ_i·q̄_i) + q̄_i (μ_i·h_i)) / n_i.

A program of the first kernel has a block of columns of B and of η, 2 d² FLOPs a token and query; of
the second, all channels of a chunk of one head, 4 d² + 8 C d.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.recurrence.chunk_tiles import (
    head_of,
    pairs_of,
    product,
    store_rows,
    store_tokens,
)
from precondattn_triton.recurrence.moments import counted
from precondattn_triton.tiles import load_rows, load_tokens


@triton.jit
def carry_moments_back(
    q,
    d_o,
    q_scale,
    weight,
    mean_q,
    mean_h,
    reading,
    total,
    d_moments,
    d_sums,
    heads,
    queries,
    s,
    t,
    tokens,
    d,
    q_b,
    q_m,
    q_t,
    q_r,
    q_d,
    o_b,
    o_m,
    o_t,
    o_r,
    o_e,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`d_moments` (m, chunks, WIDTH, WIDTH) and `d_sums` (m, chunks, WIDTH), behind every chunk."""
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK
    count = tokens // CHUNK
    q = head_of(q, head, heads, q_b, q_m, 1)
    d_o = head_of(d_o, head, heads, o_b, o_m, 1)
    second = tl.zeros((WIDTH, BLOCK), tl.float32)
    mean = tl.zeros((BLOCK,), tl.float32)
    for step in range(count):
        index = count - 1 - step
        start, at = index * CHUNK, head * count + index
        store_rows(d_moments, at, WIDTH, 0, first, second, WIDTH)
        tl.store(d_sums + at * WIDTH + first + tl.arange(0, BLOCK), mean)
        reads = tl.full((CHUNK,), 1.0, tl.float32)
        if total is not None:
            reads = tl.load(reading + head * tokens + start + tl.arange(0, CHUNK))
            kept = tl.load(total + at)
            second *= kept
            mean *= kept
        for row in range(queries):
            numbers = (head * queries + row) * tokens + start + tl.arange(0, CHUNK)
            scale = tl.load(q_scale + numbers) * reads
            own = load_tokens(q + row * q_r, start - s + t, first, t, d, q_t, q_d, CHUNK, BLOCK)
            mean += tl.sum(
                own.to(tl.float32) * (scale * tl.load(mean_h + numbers))[:, None], axis=0
            )
            outputs = d_o + row * o_r
            own = load_tokens(outputs, start - s + t, first, t, d, o_t, o_e, CHUNK, BLOCK)
            own = own.to(tl.float32) * tl.load(weight + numbers)[:, None]
            mean += tl.sum(own * (reads * tl.load(mean_q + numbers))[:, None], axis=0)
            own = (own * scale[:, None]).to(d_moments.dtype.element_ty)
            rows = load_tokens(q + row * q_r, start - s + t, 0, t, d, q_t, q_d, CHUNK, WIDTH)
            second += product(tl.trans(rows), own, PRECISION)


@triton.jit
def d_keys_of_moments(
    q,
    k,
    d_o,
    q_scale,
    k_scale,
    weight,
    mean_q,
    mean_h,
    valid,
    gates,
    writing,
    d_moments,
    d_sums,
    d_unit,
    d_raw,
    d_k,
    heads,
    queries,
    s,
    t,
    tokens,
    d,
    q_b,
    q_m,
    q_t,
    q_r,
    q_d,
    k_b,
    k_m,
    k_s,
    k_d,
    o_b,
    o_m,
    o_t,
    o_r,
    o_e,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`d_k` (b, s, m, d): dk = (dk̄ − k̄ (k̄·dk̄)) / ‖k‖, k being k̄ here, in one piece.

    `d_unit` and `d_raw` (b, s, m, d) are the gradients of k̄ and of k themselves from elsewhere.
    """
    head = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    start, at = chunk * CHUNK, head * (tokens // CHUNK) + chunk
    place = tl.arange(0, CHUNK)
    q = head_of(q, head, heads, q_b, q_m, 1)
    d_o = head_of(d_o, head, heads, o_b, o_m, 1)
    key_at = (head // heads * s * heads + head % heads) * d
    k_of = head_of(k, head, heads, k_b, k_m, 1)
    found = tl.zeros((CHUNK, WIDTH), tl.float32)
    for c in range(0, WIDTH, KEYS):
        keys = load_tokens(k_of, start, c, s, d, k_s, k_d, CHUNK, KEYS)
        moment = load_rows(d_moments, at, WIDTH, c, KEYS, WIDTH, 0, WIDTH)
        found += product(keys, moment, PRECISION)
        moment = load_rows(d_moments, at, WIDTH, 0, WIDTH, KEYS, c, WIDTH)
        found += product(keys, tl.trans(moment), PRECISION)
    found -= tl.load(d_sums + at * WIDTH + tl.arange(0, WIDTH))[None, :]
    if writing is not None:
        found *= tl.load(writing + head * tokens + start + place)[:, None]
    fading = pairs_of(gates, head * tokens + start, CHUNK, False)
    for row in range(queries):
        pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
        query_pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
        for c in range(0, WIDTH, KEYS):
            keys = load_tokens(k_of, start, c, s, d, k_s, k_d, CHUNK, KEYS)
            own = load_tokens(q + row * q_r, start - s + t, c, t, d, q_t, q_d, CHUNK, KEYS)
            query_pairs += product(own, tl.trans(keys), PRECISION)
            outputs = d_o + row * o_r
            own = load_tokens(outputs, start - s + t, c, t, d, o_t, o_e, CHUNK, KEYS)
            pairs += product(own, tl.trans(keys), PRECISION)
        numbers = (head * queries + row) * tokens + start + place
        scale, weighed = tl.load(q_scale + numbers), tl.load(weight + numbers)
        query_pairs = query_pairs * scale[:, None] - tl.load(mean_q + numbers)[:, None]
        query_pairs *= fading * weighed[:, None]
        own = load_tokens(d_o + row * o_r, start - s + t, 0, t, d, o_t, o_e, CHUNK, WIDTH)
        factor = query_pairs.to(d_moments.dtype.element_ty)
        found += product(tl.trans(factor), own, PRECISION)
        pairs = pairs * weighed[:, None] - tl.load(mean_h + numbers)[:, None]
        pairs *= fading * scale[:, None]
        own = load_tokens(q + row * q_r, start - s + t, 0, t, d, q_t, q_d, CHUNK, WIDTH)
        found += product(tl.trans(pairs.to(d_moments.dtype.element_ty)), own, PRECISION)
    found *= counted(valid, head, heads, start, s, CHUNK)[:, None]
    if d_unit is not None:
        more = load_tokens(d_unit + key_at, start, 0, s, d, heads * d, 1, CHUNK, WIDTH)
        found += more.to(tl.float32)
    keys = load_tokens(k_of, start, 0, s, d, k_s, k_d, CHUNK, WIDTH).to(tl.float32)
    found -= keys * tl.sum(keys * found, axis=1)[:, None]
    found *= tl.load(k_scale + head * tokens + start + place)[:, None]
    if d_raw is not None:
        more = load_tokens(d_raw + key_at, start, 0, s, d, heads * d, 1, CHUNK, WIDTH)
        found += more.to(tl.float32)
    store_tokens(d_k + key_at, start, 0, s, d, heads * d, found)
