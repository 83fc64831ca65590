"""What chunks read, all at once, and what of the outputs' gradients reaches what was written there.

    O = s (reading ∘ Q S + (D ∘ Q Kᵀ) U),    A = s (D ∘ Q Kᵀ)ᵀ dO, over the queries of a state.

A program has a chunk and a block of value channels; scores are made anew for every block, 2 C d
FLOPs a token each time, so that none stand in memory.
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
from precondattn_triton.tiles import load_rows, load_tokens


@triton.jit
def read(
    q,
    k,
    v,
    u,
    gates,
    reading,
    faded_q,
    scores,
    own_o,
    states,
    o,
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
    """`o` (b, t, m, r, e): the outputs of one query of each token.

    Where each key channel has its gate, s D ∘ Q Kᵀ comes as `scores` (m r, T, CHUNK), and
    reading ∘ Q as `faded_q` (m r, T, WIDTH); where each value channel has, what is read within the
    chunk comes as `own_o` (m r, T, STEP).
    """
    query = tl.program_id(1).to(tl.int64)
    head, row = query // queries, query % queries
    chunk, first = tl.program_id(0) // (STEP // BLOCK), tl.program_id(0) % (STEP // BLOCK) * BLOCK
    start = chunk * CHUNK
    q = head_of(q, head, heads, q_b, q_m, q_group) + row * q_r
    k = head_of(k, head, heads, k_b, k_m, k_group)
    found = tl.zeros((CHUNK, BLOCK), tl.float32)
    pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
    for c in range(0, WIDTH, KEYS):
        if DECAY == "keys":
            own = load_rows(faded_q, query, tokens, start, CHUNK, KEYS, c, WIDTH)
        else:
            own = load_tokens(q, start - s + t, c, t, d, q_t, q_d, CHUNK, KEYS)
        if DECAY == "none" or DECAY == "head":
            keys = load_tokens(k, start, c, s, d, k_s, k_d, CHUNK, KEYS)
            pairs += product(own, tl.trans(keys), PRECISION)
        at = head * (tokens // CHUNK) + chunk
        state = load_rows(states, at, WIDTH, c, KEYS, BLOCK, first, STEP)
        found += product(own, state, PRECISION)
    found *= scale
    if DECAY == "values":
        found *= load_rows(reading, head, tokens, start, CHUNK, BLOCK, first, STEP)
        found += load_rows(own_o, query, tokens, start, CHUNK, BLOCK, first, STEP)
    else:
        at = head * tokens + start
        if DECAY == "head":
            found *= tl.load(reading + at + tl.arange(0, CHUNK))[:, None]
        if DECAY == "keys":
            pairs = load_rows(scores, query, tokens, start, CHUNK, CHUNK, 0, CHUNK)
        else:
            pairs *= pairs_of(gates, at, CHUNK, False) * scale
        if u is not None:
            written = load_rows(u, head, tokens, start, CHUNK, BLOCK, first, STEP)
        else:
            v = head_of(v, head, heads, v_b, v_m, v_group)
            written = load_tokens(v, start, first, s, e, v_s, v_e, CHUNK, BLOCK)
        found += product(pairs, written, PRECISION)
    o += ((head // heads * t * heads + head % heads) * queries + row) * e
    store_tokens(o, start - s + t, first, t, e, heads * queries * e, found)


@triton.jit
def read_back(
    q,
    k,
    d_o,
    gates,
    scores,
    local,
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
    """`local` (m, T, STEP) gets A, of all queries of a state.

    Where each key channel has its gate, s D ∘ Q Kᵀ comes as `scores` (m r, T, CHUNK).
    """
    head = tl.program_id(1).to(tl.int64)
    chunk, first = tl.program_id(0) // (STEP // BLOCK), tl.program_id(0) % (STEP // BLOCK) * BLOCK
    start = chunk * CHUNK
    q = head_of(q, head, heads, q_b, q_m, q_group)
    k = head_of(k, head, heads, k_b, k_m, k_group)
    d_o = head_of(d_o, head, heads, o_b, o_m, 1)
    fading = tl.zeros((CHUNK, CHUNK), tl.float32)
    if DECAY != "keys":
        fading = pairs_of(gates, head * tokens + start, CHUNK, False) * scale
    found = tl.zeros((CHUNK, BLOCK), tl.float32)
    for row in range(queries):
        if DECAY == "keys":
            at = head * queries + row
            pairs = load_rows(scores, at, tokens, start, CHUNK, CHUNK, 0, CHUNK)
        else:
            pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
            for c in range(0, WIDTH, KEYS):
                own = load_tokens(q + row * q_r, start - s + t, c, t, d, q_t, q_d, CHUNK, KEYS)
                keys = load_tokens(k, start, c, s, d, k_s, k_d, CHUNK, KEYS)
                pairs += product(own, tl.trans(keys), PRECISION)
            pairs *= fading
        outputs = d_o + row * o_r
        cotangent = load_tokens(outputs, start - s + t, first, t, e, o_t, o_e, CHUNK, BLOCK)
        found += product(tl.trans(pairs), cotangent, PRECISION)
    store_rows(local, head, tokens, start, first, found, STEP)
