"""The outputs of all chunks at once, and the part of dU from outputs of the same chunk.

    O = s (reading ∘ Q S + (D ∘ Q Kᵀ) U),    A = s (D ∘ Q Kᵀ)ᵀ dO  (summed over a state's queries).

Grid: one program per chunk and block of value channels, and per query of each token (`read_states`)
or head (`read_back`, with a gate per key channel). `read_states` recomputes scores for every block,
2 C d FLOPs per token each time, so that they are not stored. With a gate per channel, `d_scores_of`
has no blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.recurrence.chunk_tiles import (
    as_factor,
    head_of,
    load_head,
    load_queries,
    pairs_from,
    pairs_of,
    product,
    store_rows,
    store_tokens,
)
from precondattn_triton.tiles import load_rows


@triton.jit
def read_states(
    q, k, v, u, gates, reading, decayed_q, scores, within_o, states, o, sizes,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    STEP: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the outputs of one query of each token to `o` (b, t, m, r, e).

    With a gate per key channel, `scores` (m r, T, CHUNK) is s D ∘ Q Kᵀ and `decayed_q` (m r, T,
    WIDTH) is reading ∘ Q. With a gate per value channel, `within_o` (m r, T, STEP) is the output
    from the tokens of the same chunk.
    """
    heads, queries, s, t = sizes.heads, sizes.queries, sizes.s, sizes.t
    tokens, d, e, scale = sizes.tokens, sizes.d, sizes.e, sizes.scale
    query = tl.program_id(1).to(tl.int64)
    head, row = query // queries, query % queries
    chunk, first = tl.program_id(0) // (STEP // BLOCK), tl.program_id(0) % (STEP // BLOCK) * BLOCK
    start = chunk * CHUNK
    q_start = head_of(q, head, heads) + row * q.row
    k_start = head_of(k, head, heads)
    out = tl.zeros((CHUNK, BLOCK), tl.float32)
    pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
    for c in range(0, WIDTH, KEYS):
        if DECAY == "keys":
            query_rows = load_rows(decayed_q, query, tokens, start, CHUNK, KEYS, c, WIDTH)
        else:
            query_rows = load_head(q, q_start, start - s + t, c, t, d, CHUNK, KEYS)
        if DECAY == "none" or DECAY == "head":
            keys = load_head(k, k_start, start, c, s, d, CHUNK, KEYS)
            pairs += product(query_rows, tl.trans(keys), PRECISION)
        at = head * (tokens // CHUNK) + chunk
        state = load_rows(states, at, WIDTH, c, KEYS, BLOCK, first, STEP)
        out += product(query_rows, state, PRECISION)
    out *= scale
    if DECAY == "values":
        out *= load_rows(reading, head, tokens, start, CHUNK, BLOCK, first, STEP)
        out += load_rows(within_o, query, tokens, start, CHUNK, BLOCK, first, STEP)
    else:
        at = head * tokens + start
        if DECAY == "head":
            out *= tl.load(reading + at + tl.arange(0, CHUNK))[:, None]
        if DECAY == "keys":
            pairs = load_rows(scores, query, tokens, start, CHUNK, CHUNK, 0, CHUNK)
        else:
            pairs *= pairs_of(gates, at, CHUNK, False) * scale
        if u is not None:
            written = load_rows(u, head, tokens, start, CHUNK, BLOCK, first, STEP)
        else:
            v_start = head_of(v, head, heads)
            written = load_head(v, v_start, start, first, s, e, CHUNK, BLOCK)
        out += product(as_factor(pairs, states), written, PRECISION)
    o += ((head // heads * t * heads + head % heads) * queries + row) * e
    store_tokens(o, start - s + t, first, t, e, heads * queries * e, out)


@triton.jit
def read_back(
    d_o, scores, local, sizes,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write A, of keys with a gate per channel and summed over queries, to `local` (m, T, STEP).

    `scores` (m r, T, CHUNK) is s D ∘ Q Kᵀ.
    """
    heads, queries, s = sizes.heads, sizes.queries, sizes.s
    t, tokens, e = sizes.t, sizes.tokens, sizes.e
    head = tl.program_id(1).to(tl.int64)
    chunk, first = tl.program_id(0) // (STEP // BLOCK), tl.program_id(0) % (STEP // BLOCK) * BLOCK
    start = chunk * CHUNK
    d_o_start = head_of(d_o, head, heads)
    gradient = tl.zeros((CHUNK, BLOCK), tl.float32)
    for row in range(queries):
        pairs = load_rows(scores, head * queries + row, tokens, start, CHUNK, CHUNK, 0, CHUNK)
        cotangent = load_queries(d_o, d_o_start, row, start - s + t, first, t, e, CHUNK, BLOCK)
        gradient += product(tl.trans(as_factor(pairs, local)), cotangent, PRECISION)
    store_rows(local, head, tokens, start, first, gradient, STEP)


@triton.jit
def d_scores_of(
    v, u, d_o, d_scores, sizes,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dA of one query per token to `d_scores` (m r, T, CHUNK)."""
    heads, queries, s, t = sizes.heads, sizes.queries, sizes.s, sizes.t
    tokens, e, scale = sizes.tokens, sizes.e, sizes.scale
    query = tl.program_id(1).to(tl.int64)
    head, row = query // queries, query % queries
    start = tl.program_id(0) * CHUNK
    d_o_start = head_of(d_o, head, heads) + row * d_o.row
    v_start = head_of(v, head, heads)
    d_pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
    for c in range(0, STEP, BLOCK):
        cotangent = load_head(d_o, d_o_start, start - s + t, c, t, e, CHUNK, BLOCK)
        if u is not None:
            written = load_rows(u, head, tokens, start, CHUNK, BLOCK, c, STEP)
        else:
            written = load_head(v, v_start, start, c, s, e, CHUNK, BLOCK)
        d_pairs += product(cotangent, tl.trans(written), PRECISION)
    d_pairs *= pairs_from(None, CHUNK, False) * scale
    store_rows(d_scores, query, tokens, start, 0, d_pairs, CHUNK)
