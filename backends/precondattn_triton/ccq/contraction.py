"""CCQ's query of every chunk, from the moments in front of it.

    q^c = q̄ − λ c,    c_i = Σ_i q̄_i = (q̄_i A_i − (μ_i·q̄_i) m_i) / n_i,    μ = m / n,

with A, m and n of `moments.py` up to and with token i. Of a chunk's own keys that takes no more
than one product, of pairs from which the mean has been taken away,

    c_i n_i = q̄_i A − (μ_i·q̄_i) m + Σ_j D_ij (q̄_i·k̄_j − μ_i·q̄_i) k̄_j,

where A and m are those in front of the chunk, if they are of token i's segment, and D_ij is 1 for
the tokens j ≤ i of that. A program has all channels of a chunk of one query head, 2 d² + 4 C d
FLOPs a token, and reads A once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.recurrence.chunk_tiles import head_of, pairs_of, product, store_tokens
from precondattn_triton.recurrence.moments import counted
from precondattn_triton.tiles import load_rows, load_tokens


@triton.jit
def visible_pairs(gates, reading, counts, counted_keys, head, tokens, start, CHUNK: tl.constexpr):
    """D, whether a token sees what is in front of the chunk, and n of each token, 1 at least."""
    place = head * tokens + start
    fading = pairs_of(gates, place, CHUNK, False)
    reads = tl.full((CHUNK,), 1.0, tl.float32)
    if reading is not None:
        reads = tl.load(reading + place + tl.arange(0, CHUNK))
    number = reads * tl.load(counts + head * (tokens // CHUNK) + start // CHUNK)
    number += tl.sum(fading * counted_keys[None, :], axis=1)
    # Rows in front of any token that counts.
    return fading, reads, tl.where(number > 0, number, 1.0)


@triton.jit
def centred(pairs, fading, seen, reads, number):
    """μ·x, and the pairs x·k̄ with μ·x taken away, of all pairs x·k̄ and of x·m."""
    pairs *= fading
    mean = (tl.sum(pairs, axis=1) + reads * seen) / number
    return mean, pairs - mean[:, None] * fading


@triton.jit
def contract(
    q,
    k,
    contraction,
    q_scale,
    valid,
    gates,
    reading,
    moments,
    sums,
    counts,
    o,
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
    l_b,
    l_t,
    l_h,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`o` (b, t, m, r, d): q^c of one query of each token. k has rows of length 1, q its own."""
    query = tl.program_id(1).to(tl.int64)
    head, row = query // queries, query % queries
    chunk = tl.program_id(0)
    start, at = chunk * CHUNK, head * (tokens // CHUNK) + chunk
    place = tl.arange(0, CHUNK)
    q = head_of(q, head, heads, q_b, q_m, 1) + row * q_r
    k = head_of(k, head, heads, k_b, k_m, 1)
    found = tl.zeros((CHUNK, WIDTH), tl.float32)
    pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
    seen = tl.zeros((CHUNK,), tl.float32)
    for c in range(0, WIDTH, KEYS):
        own = load_tokens(q, start - s + t, c, t, d, q_t, q_d, CHUNK, KEYS)
        keys = load_tokens(k, start, c, s, d, k_s, k_d, CHUNK, KEYS)
        pairs += product(own, tl.trans(keys), PRECISION)
        moment = load_rows(moments, at, WIDTH, c, KEYS, WIDTH, 0, WIDTH)
        found += product(own, moment, PRECISION)
        sum_of = tl.load(sums + at * WIDTH + c + tl.arange(0, KEYS))
        seen += tl.sum(own.to(tl.float32) * sum_of[None, :], axis=1)
    scale = tl.load(q_scale + query * tokens + start + place)
    among = counted(valid, head, heads, start, s, CHUNK)
    fading, reads, number = visible_pairs(gates, reading, counts, among, head, tokens, start, CHUNK)
    mean, pairs = centred(pairs * scale[:, None], fading, seen * scale, reads, number)
    found *= (reads * scale)[:, None]
    sum_of = tl.load(sums + at * WIDTH + tl.arange(0, WIDTH))
    found -= (reads * mean)[:, None] * sum_of[None, :]
    keys = load_tokens(k, start, 0, s, d, k_s, k_d, CHUNK, WIDTH)
    found += product(pairs.to(moments.dtype.element_ty), keys, PRECISION)
    token = start - s + t + place.to(tl.int64)
    strength = contraction + head // heads * l_b + (head % heads * queries + row) * l_h
    strength = tl.load(strength + token * l_t, mask=(token >= 0) & (token < t), other=0.0)
    own = load_tokens(q, start - s + t, 0, t, d, q_t, q_d, CHUNK, WIDTH).to(tl.float32)
    found = own * scale[:, None] - (strength.to(tl.float32) / number)[:, None] * found
    o += ((head // heads * t * heads + head % heads) * queries + row) * d
    store_tokens(o, start - s + t, 0, t, d, heads * queries * d, found)
