"""The gradients of queries and keys with a gate per channel, all chunks at once.

    dA = s tril(dO Uᵀ),    dQ = … + s reading ∘ dO Sᵀ,
    dK = … + writing ∘ U dSᵀ − reading ∘ β ∘ X Sᵀ,

the last term with the delta rule only, with X of `delta_rule.py`; S is the state before the chunk,
dS the gradient of the state after it. The pairs of tokens within the chunk are computed by
`channel_decay.py`; with a gate per value channel, their part of dQ is dA K, and of dK dAᵀ Q. If
other keys are erased than K, the term of X is theirs (`erase_gradient.py`). Grid: one program per
chunk and block of key channels, and per query of each token (dQ) or head (dK); dA has no blocks. It
iterates over the value channels. For the gradients of gates and β it also computes x ∘ dx, for the
parts of dQ and dK from the state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.recurrence.chunk_tiles import (
    as_factor,
    head_of,
    pairs_from,
    product,
    store_rows,
    store_tokens,
)
from precondattn_triton.tiles import load_rows, load_tokens


@triton.jit
def d_scores_of(
    v,
    u,
    d_o,
    d_scores,
    heads,
    queries,
    s,
    t,
    tokens,
    e,
    scale,
    v_b,
    v_m,
    v_s,
    v_e,
    v_group,
    o_b,
    o_m,
    o_t,
    o_r,
    o_e,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write dA of one query per token to `d_scores` (m r, T, CHUNK)."""
    query = tl.program_id(1).to(tl.int64)
    head, row = query // queries, query % queries
    start = tl.program_id(0) * CHUNK
    d_o = head_of(d_o, head, heads, o_b, o_m, 1) + row * o_r
    v = head_of(v, head, heads, v_b, v_m, v_group)
    d_pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
    for c in range(0, STEP, BLOCK):
        cotangent = load_tokens(d_o, start - s + t, c, t, e, o_t, o_e, CHUNK, BLOCK)
        if u is not None:
            written = load_rows(u, head, tokens, start, CHUNK, BLOCK, c, STEP)
        else:
            written = load_tokens(v, start, c, s, e, v_s, v_e, CHUNK, BLOCK)
        d_pairs += product(cotangent, tl.trans(written), PRECISION)
    d_pairs *= pairs_from(None, CHUNK, False) * scale
    store_rows(d_scores, query, tokens, start, 0, d_pairs, CHUNK)


@triton.jit
def d_queries(
    q,
    k,
    d_o,
    reading,
    d_scores,
    within_q,
    states,
    d_q,
    read,
    heads,
    queries,
    s,
    t,
    tokens,
    d,
    e,
    scale,
    q_b,
    q_m,
    q_t,
    q_r,
    q_d,
    q_group,
    k_b,
    k_m,
    k_s,
    k_d,
    k_group,
    o_b,
    o_m,
    o_t,
    o_r,
    o_e,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    DECAY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write KEYS channels of `d_q` (b, t, m, r, d), of one query per token.

    With a gate per key channel, `read` (m r, T, WIDTH) gets Q ∘ dQ, for the part of dQ from the
    state, and `within_q` (m r, T, WIDTH) is the part of dQ from within the chunk.
    """
    BLOCKS: tl.constexpr = WIDTH // KEYS
    query = tl.program_id(1).to(tl.int64)
    head, row = query // queries, query % queries
    chunk, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    start, first = chunk * CHUNK, block * KEYS
    d_o = head_of(d_o, head, heads, o_b, o_m, 1) + row * o_r
    k = head_of(k, head, heads, k_b, k_m, k_group)
    gradient = tl.zeros((CHUNK, KEYS), tl.float32)
    for c in range(0, STEP, BLOCK):
        cotangent = load_tokens(d_o, start - s + t, c, t, e, o_t, o_e, CHUNK, BLOCK)
        if DECAY == "values":
            cotangent = cotangent * load_rows(reading, head, tokens, start, CHUNK, BLOCK, c, STEP)
            cotangent = as_factor(cotangent, states)
        at = head * (tokens // CHUNK) + chunk
        state = load_rows(states, at, WIDTH, first, KEYS, BLOCK, c, STEP)
        gradient += product(cotangent, tl.trans(state), PRECISION)
    gradient *= scale
    if DECAY == "keys":
        gradient *= load_rows(reading, head, tokens, start, CHUNK, KEYS, first, WIDTH)
        q = head_of(q, head, heads, q_b, q_m, q_group) + row * q_r
        query_rows = load_tokens(q, start - s + t, first, t, d, q_t, q_d, CHUNK, KEYS)
        store_rows(read, query, tokens, start, first, gradient * query_rows.to(tl.float32), WIDTH)
        gradient += load_rows(within_q, query, tokens, start, CHUNK, KEYS, first, WIDTH)
    else:
        pairs = load_rows(d_scores, query, tokens, start, CHUNK, CHUNK, 0, CHUNK)
        keys = load_tokens(k, start, first, s, d, k_s, k_d, CHUNK, KEYS)
        gradient += product(pairs, keys, PRECISION)
    d_q += ((head // heads * t * heads + head % heads) * queries + row) * d
    store_tokens(d_q, start - s + t, first, t, d, heads * queries * d, gradient)


@triton.jit
def d_keys_of(
    q,
    k,
    v,
    u,
    strength,
    reading,
    writing,
    d_scores,
    within_k,
    right,
    states,
    d_states,
    d_k,
    written,
    erased,
    from_keys,
    overlap,
    heads,
    queries,
    s,
    t,
    tokens,
    d,
    e,
    q_b,
    q_m,
    q_t,
    q_r,
    q_d,
    q_group,
    k_b,
    k_m,
    k_s,
    k_d,
    k_group,
    v_b,
    v_m,
    v_s,
    v_e,
    v_group,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    DECAY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write KEYS channels of `d_k` (b, s, m, d).

    With a gate per key channel, `written` (m, T, WIDTH) gets K ∘ dK, for the part of dK from the
    state after the chunk, `overlap` (m, chunks, WIDTH) gets Σ S ∘ dS over value channels, and
    `within_k` (m, T, WIDTH) is the part of dK from the chunk's own tokens. With the delta rule,
    `from_keys` (m, blocks, T) gets Σ K ∘ (reading ∘ X Sᵀ), and `erased` (m, T, WIDTH) gets K ∘
    (reading ∘ β ∘ X Sᵀ). If other keys are erased, `right` is None, and so is all that is computed
    from it.
    """
    BLOCKS: tl.constexpr = WIDTH // KEYS
    head = tl.program_id(1).to(tl.int64)
    chunk, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    start, first = chunk * CHUNK, block * KEYS
    q = head_of(q, head, heads, q_b, q_m, q_group)
    k = head_of(k, head, heads, k_b, k_m, k_group)
    v = head_of(v, head, heads, v_b, v_m, v_group)
    gradient = tl.zeros((CHUNK, KEYS), tl.float32)
    from_state = tl.zeros((CHUNK, KEYS), tl.float32)
    overlaps = tl.zeros((KEYS,), tl.float32)
    chunk_at = head * (tokens // CHUNK) + chunk
    for c in range(0, STEP, BLOCK):
        d_state = load_rows(d_states, chunk_at, WIDTH, first, KEYS, BLOCK, c, STEP)
        if u is not None:
            rows = load_rows(u, head, tokens, start, CHUNK, BLOCK, c, STEP)
        else:
            rows = load_tokens(v, start, c, s, e, v_s, v_e, CHUNK, BLOCK)
        if DECAY == "values":
            rows = rows * load_rows(writing, head, tokens, start, CHUNK, BLOCK, c, STEP)
            rows = as_factor(rows, states)
        gradient += product(rows, tl.trans(d_state), PRECISION)
        state = load_rows(states, chunk_at, WIDTH, first, KEYS, BLOCK, c, STEP)
        if DECAY == "keys":
            overlaps += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), axis=1)
        if right is not None:
            erasures = load_rows(right, head, tokens, start, CHUNK, BLOCK, c, STEP)
            from_state += product(erasures, tl.trans(state), PRECISION)
    position = tl.arange(0, CHUNK)
    numbers = head * tokens + start + position
    sums = (head * BLOCKS + block) * tokens + start + position
    keys = load_tokens(k, start, first, s, d, k_s, k_d, CHUNK, KEYS)
    if DECAY == "keys":
        tl.store(overlap + chunk_at * WIDTH + first + tl.arange(0, KEYS), overlaps)
        gradient *= load_rows(writing, head, tokens, start, CHUNK, KEYS, first, WIDTH)
        store_rows(written, head, tokens, start, first, gradient * keys.to(tl.float32), WIDTH)
        gradient += load_rows(within_k, head, tokens, start, CHUNK, KEYS, first, WIDTH)
    else:
        for row in range(queries):
            at = head * queries + row
            pairs = load_rows(d_scores, at, tokens, start, CHUNK, CHUNK, 0, CHUNK)
            rows = load_tokens(q + row * q_r, start - s + t, first, t, d, q_t, q_d, CHUNK, KEYS)
            gradient += product(tl.trans(pairs), rows, PRECISION)
    if right is not None:
        from_state *= load_rows(reading, head, tokens, start, CHUNK, KEYS, first, WIDTH)
        read_keys = from_state * keys.to(tl.float32)
        tl.store(from_keys + sums, tl.sum(read_keys, axis=1))
        beta = tl.load(strength + numbers)[:, None]
        gradient -= beta * from_state
        store_rows(erased, head, tokens, start, first, beta * read_keys, WIDTH)
    d_k += (head // heads * s * heads + head % heads) * d
    store_tokens(d_k, start, first, s, d, heads * d, gradient)
