"""The gradient of the keys, from which CCQ's covariance is computed.

With h = −λ dq^c, D as in `contraction.py`, and n_i and μ_i of token i,

    dk̄_j = Σ_{i≥j} D_ij ( (h_i / n_i) (q̄_i·k̄_j − μ_i·q̄_i) + q̄_i (h_i·k̄_j − μ_i·h_i) / n_i ),

where the sum over the tokens after j's chunk is, with B and η carried backward over the chunks,

    (B + Bᵀ) k̄_j − η,    B = Σ q̄_i h_iᵀ / n_i,    η = Σ (h_i (μ_i·q̄_i) + q̄_i (μ_i·h_i)) / n_i.

Grid of the first kernel: one program per block of columns of B and η, of one head; 2 d² FLOPs per
token and query. Grid of the second: one program per chunk of one head, with all channels; 4 d² +
8 C d FLOPs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.recurrence.chunk_tiles import (
    head_of,
    load_head,
    load_queries,
    pairs_of,
    product,
    store_rows,
    store_tokens,
)
from precondattn_triton.recurrence.moments import counted
from precondattn_triton.tiles import load_rows, load_tokens


@triton.jit
def carry_moments_back(
    q, d_o, q_scale, weight, mean_q, mean_h, reading, total, d_moments, d_sums, sizes,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For every chunk, write B to `d_moments` (m, chunks, WIDTH, WIDTH), η to `d_sums`."""
    heads, queries, s = sizes.heads, sizes.queries, sizes.s
    t, tokens, d = sizes.t, sizes.tokens, sizes.d
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK
    count = tokens // CHUNK
    q_start = head_of(q, head, heads)
    d_o_start = head_of(d_o, head, heads)
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
            decay = tl.load(total + at)
            second *= decay
            mean *= decay
        for row in range(queries):
            numbers = (head * queries + row) * tokens + start + tl.arange(0, CHUNK)
            scale = tl.load(q_scale + numbers) * reads
            columns = load_queries(q, q_start, row, start - s + t, first, t, d, CHUNK, BLOCK)
            mean += tl.sum(
                columns.to(tl.float32) * (scale * tl.load(mean_h + numbers))[:, None], axis=0
            )
            columns = load_queries(d_o, d_o_start, row, start - s + t, first, t, d, CHUNK, BLOCK)
            columns = columns.to(tl.float32) * tl.load(weight + numbers)[:, None]
            mean += tl.sum(columns * (reads * tl.load(mean_q + numbers))[:, None], axis=0)
            columns = (columns * scale[:, None]).to(d_moments.dtype.element_ty)
            rows = load_queries(q, q_start, row, start - s + t, 0, t, d, CHUNK, WIDTH)
            second += product(tl.trans(rows), columns, PRECISION)


@triton.jit
def d_keys_of_moments(
    q, k, d_o, q_scale, k_scale, weight, mean_q, mean_h, valid, gates, writing, d_moments, d_sums,
    d_unit, d_raw, d_k, sizes,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dk = (dk̄ − k̄ (k̄·dk̄)) / ‖k‖ to `d_k` (b, s, m, d), contiguous; the argument k is k̄.

    `d_unit` and `d_raw` (b, s, m, d) are gradients of k̄ and of k from the backbone, or None.
    """
    heads, queries, s = sizes.heads, sizes.queries, sizes.s
    t, tokens, d = sizes.t, sizes.tokens, sizes.d
    head = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    start, at = chunk * CHUNK, head * (tokens // CHUNK) + chunk
    position = tl.arange(0, CHUNK)
    q_start = head_of(q, head, heads)
    d_o_start = head_of(d_o, head, heads)
    key_at = (head // heads * s * heads + head % heads) * d
    k_start = head_of(k, head, heads)
    gradient = tl.zeros((CHUNK, WIDTH), tl.float32)
    for c in range(0, WIDTH, KEYS):
        keys = load_head(k, k_start, start, c, s, d, CHUNK, KEYS)
        moment = load_rows(d_moments, at, WIDTH, c, KEYS, WIDTH, 0, WIDTH)
        gradient += product(keys, moment, PRECISION)
        moment = load_rows(d_moments, at, WIDTH, 0, WIDTH, KEYS, c, WIDTH)
        gradient += product(keys, tl.trans(moment), PRECISION)
    gradient -= tl.load(d_sums + at * WIDTH + tl.arange(0, WIDTH))[None, :]
    if writing is not None:
        gradient *= tl.load(writing + head * tokens + start + position)[:, None]
    decay = pairs_of(gates, head * tokens + start, CHUNK, False)
    for row in range(queries):
        pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
        query_pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
        for c in range(0, WIDTH, KEYS):
            keys = load_head(k, k_start, start, c, s, d, CHUNK, KEYS)
            query_rows = load_queries(q, q_start, row, start - s + t, c, t, d, CHUNK, KEYS)
            query_pairs += product(query_rows, tl.trans(keys), PRECISION)
            query_rows = load_queries(d_o, d_o_start, row, start - s + t, c, t, d, CHUNK, KEYS)
            pairs += product(query_rows, tl.trans(keys), PRECISION)
        numbers = (head * queries + row) * tokens + start + position
        scale, factor_of_h = tl.load(q_scale + numbers), tl.load(weight + numbers)
        query_pairs = query_pairs * scale[:, None] - tl.load(mean_q + numbers)[:, None]
        query_pairs *= decay * factor_of_h[:, None]
        query_rows = load_queries(d_o, d_o_start, row, start - s + t, 0, t, d, CHUNK, WIDTH)
        pair_weights = query_pairs.to(d_moments.dtype.element_ty)
        gradient += product(tl.trans(pair_weights), query_rows, PRECISION)
        pairs = pairs * factor_of_h[:, None] - tl.load(mean_h + numbers)[:, None]
        pairs *= decay * scale[:, None]
        query_rows = load_queries(q, q_start, row, start - s + t, 0, t, d, CHUNK, WIDTH)
        gradient += product(tl.trans(pairs.to(d_moments.dtype.element_ty)), query_rows, PRECISION)
    gradient *= counted(valid, head, heads, start, s, CHUNK)[:, None]
    if d_unit is not None:
        from_backbone = load_tokens(d_unit + key_at, start, 0, s, d, heads * d, 1, CHUNK, WIDTH)
        gradient += from_backbone.to(tl.float32)
    keys = load_head(k, k_start, start, 0, s, d, CHUNK, WIDTH).to(tl.float32)
    gradient -= keys * tl.sum(keys * gradient, axis=1)[:, None]
    gradient *= tl.load(k_scale + head * tokens + start + position)[:, None]
    if d_raw is not None:
        from_backbone = load_tokens(d_raw + key_at, start, 0, s, d, heads * d, 1, CHUNK, WIDTH)
        gradient += from_backbone.to(tl.float32)
    store_tokens(d_k + key_at, start, 0, s, d, heads * d, gradient)
