"""Factors that gates make of a chunk, and the gradient of gates and β, a few numbers a token.

    reading_i = e^{g_1 + … + g_i},    writing_j = e^{g_{j+1} + … + g_C},    total = reading_C

The gradient of a gate is a sum over what it stands between: pairs of tokens (`crossing`), a token
and the state in front of the chunk (`read`), a token and the state behind it (`written`), and both
states (`overlap`). A program has a chunk of one head.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-200.0)
"""A gate of which float32's exponential is 0, as of −∞."""


@triton.jit
def load_factors(
    g,
    beta,
    gates,
    reading,
    writing,
    total,
    strength,
    heads,
    s,
    tokens,
    g_b,
    g_m,
    g_s,
    beta_b,
    beta_m,
    beta_s,
    CHUNK: tl.constexpr,
):
    """Into scratch: g as `gates`, reading, writing (m, T) and total (m, chunks); β as `strength`.

    What there is none of is None, with what would be made of it.
    """
    head = tl.program_id(1).to(tl.int64)
    b, n = head // heads, head % heads
    place = tl.arange(0, CHUNK)
    token = (tl.program_id(0) * CHUNK + place).to(tl.int64)
    if g is not None:
        at = g + b * g_b + n * g_m
        own = tl.load(at + token * g_s, mask=token < s, other=0.0).to(tl.float32)
        own = tl.maximum(own, LOWEST)
        # The gate of the token behind each, in the same chunk.
        has_next = (place + 1 < CHUNK) & (token + 1 < s)
        behind = tl.load(at + (token + 1) * g_s, mask=has_next, other=0.0).to(tl.float32)
        behind = tl.maximum(behind, LOWEST)
        tl.store(gates + head * tokens + token, own)
        tl.store(reading + head * tokens + token, tl.exp(tl.cumsum(own, axis=0)))
        until_end = tl.cumsum(behind, axis=0, reverse=True)
        tl.store(writing + head * tokens + token, tl.exp(until_end))
        all_of = tl.exp(tl.sum(own, axis=0))
        tl.store(total + head * tl.num_programs(0) + tl.program_id(0), all_of)
    if beta is not None:
        at = beta + b * beta_b + n * beta_m + token * beta_s
        own = tl.load(at, mask=token < s, other=0.0).to(tl.float32)
        tl.store(strength + head * tokens + token, own)


@triton.jit
def gate_gradient(
    strength,
    total,
    crossing,
    crossing_keys,
    read,
    written,
    overlap,
    from_keys,
    d_strength,
    d_g,
    d_beta,
    s,
    tokens,
    queries,
    CHUNK: tl.constexpr,
    READ_BLOCKS: tl.constexpr,
    KEY_BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """dg and dβ (m, s), of whichever there are.

    From sums by blocks of key channels: `read` (m r, blocks, T), `written` and `from_keys` (m,
    blocks, T), and `overlap` (m, chunks, WIDTH). `crossing` (m r, T) and, by the delta rule,
    `crossing_keys` (m, T) are already by gate. `d_strength` (m, T) is β's but for `from_keys`.
    """
    head = tl.program_id(1).to(tl.int64)
    place = tl.arange(0, CHUNK)
    token = (tl.program_id(0) * CHUNK + place).to(tl.int64)
    from_state = tl.zeros((CHUNK,), tl.float32)
    if d_beta is not None:
        for block in range(KEY_BLOCKS):
            from_state += tl.load(from_keys + (head * KEY_BLOCKS + block) * tokens + token)
        own = tl.load(d_strength + head * tokens + token) - from_state
        tl.store(d_beta + head * s + token, own, mask=token < s)
    if d_g is not None:
        crossed = tl.zeros((CHUNK,), tl.float32)
        reads = tl.zeros((CHUNK,), tl.float32)
        for row in range(queries):
            crossed += tl.load(crossing + (head * queries + row) * tokens + token)
            for block in range(READ_BLOCKS):
                at = ((head * queries + row) * READ_BLOCKS + block) * tokens
                reads += tl.load(read + at + token)
        if crossing_keys is not None:
            crossed += tl.load(crossing_keys + head * tokens + token)
            reads -= tl.load(strength + head * tokens + token) * from_state
        writes = tl.zeros((CHUNK,), tl.float32)
        for block in range(KEY_BLOCKS):
            # Of the tokens before each.
            at = (head * KEY_BLOCKS + block) * tokens + token - 1
            writes += tl.load(written + at, mask=place > 0, other=0.0)
        chunk = head * tl.num_programs(0) + tl.program_id(0)
        kept = tl.load(overlap + chunk * WIDTH + tl.arange(0, WIDTH))
        kept = tl.sum(kept, axis=0) * tl.load(total + chunk)
        found = crossed + tl.cumsum(reads, axis=0, reverse=True) + tl.cumsum(writes, axis=0)
        tl.store(d_g + head * s + token, found + kept, mask=token < s)
