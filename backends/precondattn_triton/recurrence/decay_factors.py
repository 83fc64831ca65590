"""The decay factors of a chunk, and the gradient of gates of channels.

    reading_i = e^{g_1 + … + g_i},    writing_j = e^{g_{j+1} + … + g_C},    total = reading_C

With a gate per head these are numbers (m, T), and keys that are erased from the state before its
decay are read with reading_{i−1}. The delta rule computes them in its own pass over the keys
(`delta_rule.py`). With a gate per channel they are rows (m, T, w). Grid: one program per chunk, and
per block of channels if these have gates, of one head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.recurrence.chunk_tiles import (
    head_of,
    load_head,
    load_queries,
    product,
    store_rows,
)
from precondattn_triton.tiles import load_rows

LOWEST = tl.constexpr(-200.0)
"""A gate whose exponential is 0 in float32, like that of −∞."""


@triton.jit
def numbers_of(x, head, heads, token, mask):
    """The numbers of some tokens of a head, in float32; 0 outside the mask."""
    at = head_of(x, head, heads) + token * x.token
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def gates_of(g, head, heads, token, mask):
    """The gates of some tokens of a head, 0 outside the mask."""
    return tl.where(mask, tl.maximum(numbers_of(g, head, heads, token, mask), LOWEST), 0.0)


@triton.jit
def factors_of(
    g, head, heads, gates, reading, erasing, writing, total, at, chunk, start, s,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the factors of the chunk that begins at `start`, from the gates `g` of a head.

    They are stored at `at` of `gates`, `reading`, `erasing` and `writing`, and at `chunk` of
    `total`. The decay from before the chunk to when each token erases is returned, and `writing`.
    """
    position = tl.arange(0, CHUNK)
    token = (start + position).to(tl.int64)
    loaded = gates_of(g, head, heads, token, token < s)
    # The gate of the next token, in the same chunk.
    has_next = (position + 1 < CHUNK) & (token + 1 < s)
    following = gates_of(g, head, heads, token + 1, has_next)
    until_now = tl.exp(tl.cumsum(loaded, axis=0))
    until_end = tl.exp(tl.cumsum(following, axis=0, reverse=True))
    tl.store(gates + at, loaded)
    tl.store(reading + at, until_now)
    tl.store(writing + at, until_end)
    tl.store(total + chunk, tl.exp(tl.sum(loaded, axis=0)))
    if erasing is not None:
        preceding = gates_of(g, head, heads, token - 1, (position > 0) & (token - 1 < s))
        until_now = tl.exp(tl.cumsum(preceding, axis=0))
        tl.store(erasing + at, until_now)
    return until_now, until_end


@triton.jit
def load_factors(g, gates, reading, writing, total, sizes, CHUNK: tl.constexpr):
    """Write g to `gates`, reading, writing (m, T) and total (m, chunks)."""
    heads, s, tokens = sizes.heads, sizes.s, sizes.tokens
    head = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0) * CHUNK
    at = head * tokens + start + tl.arange(0, CHUNK)
    chunk = head * tl.num_programs(0) + tl.program_id(0)
    factors_of(g, head, heads, gates, reading, None, writing, total, at, chunk, start, s, CHUNK)


@triton.jit
def load_channel_factors(
    g, reading, writing, total, sizes, width,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, GATE_STEP: tl.constexpr,
):  # fmt: skip
    """Write reading, writing (m, T, w) and total (m, chunks, w)."""
    heads, s, tokens = sizes.heads, sizes.s, sizes.tokens
    BLOCKS: tl.constexpr = GATE_STEP // BLOCK
    head = tl.program_id(1).to(tl.int64)
    chunk, first = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * BLOCK
    start = chunk * CHUNK
    g_start = head_of(g, head, heads)
    loaded = load_head(g, g_start, start, first, s, width, CHUNK, BLOCK).to(tl.float32)
    loaded = tl.maximum(loaded, LOWEST)
    # The gates of the next token, in the same chunk.
    following = load_head(g, g_start, start + 1, first, s, width, CHUNK, BLOCK).to(tl.float32)
    has_next = tl.arange(0, CHUNK) + 1 < CHUNK
    following = tl.where(has_next[:, None], tl.maximum(following, LOWEST), 0.0)
    since, until = tl.cumsum(loaded, axis=0), tl.cumsum(following, axis=0, reverse=True)
    store_rows(reading, head, tokens, start, first, tl.exp(since), GATE_STEP)
    store_rows(writing, head, tokens, start, first, tl.exp(until), GATE_STEP)
    at = (head * (tokens // CHUNK) + chunk) * GATE_STEP + first + tl.arange(0, BLOCK)
    tl.store(total + at, tl.exp(tl.sum(loaded, axis=0)))


@triton.jit
def sums_of_values(
    q, k, v, d_o, reading, writing, states, d_states, query_products, key_products, overlap, sizes,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums from which the gradient of gates per value channel is computed.

    `query_products` (m r, T, STEP) gets s reading ∘ Q S ∘ dO, `key_products` (m, T, STEP) gets
    writing ∘ K dS ∘ V, and `overlap` (m, chunks, STEP) gets Σ S ∘ dS over key channels.
    """
    heads, queries, s, t = sizes.heads, sizes.queries, sizes.s, sizes.t
    tokens, d, e, scale = sizes.tokens, sizes.d, sizes.e, sizes.scale
    BLOCKS: tl.constexpr = STEP // BLOCK
    head = tl.program_id(1).to(tl.int64)
    chunk, first = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * BLOCK
    start, at = chunk * CHUNK, head * (tokens // CHUNK) + chunk
    q_start = head_of(q, head, heads)
    k_start = head_of(k, head, heads)
    v_start = head_of(v, head, heads)
    d_o_start = head_of(d_o, head, heads)
    sums = tl.zeros((CHUNK, BLOCK), tl.float32)
    both = tl.zeros((BLOCK,), tl.float32)
    for c in range(0, WIDTH, KEYS):
        state = load_rows(states, at, WIDTH, c, KEYS, BLOCK, first, STEP)
        d_state = load_rows(d_states, at, WIDTH, c, KEYS, BLOCK, first, STEP)
        both += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), axis=0)
        keys = load_head(k, k_start, start, c, s, d, CHUNK, KEYS)
        sums += product(keys, d_state, PRECISION)
    tl.store(overlap + at * STEP + first + tl.arange(0, BLOCK), both)
    sums *= load_rows(writing, head, tokens, start, CHUNK, BLOCK, first, STEP)
    sums *= load_head(v, v_start, start, first, s, e, CHUNK, BLOCK).to(tl.float32)
    store_rows(key_products, head, tokens, start, first, sums, STEP)
    for row in range(queries):
        sums = tl.zeros((CHUNK, BLOCK), tl.float32)
        for c in range(0, WIDTH, KEYS):
            state = load_rows(states, at, WIDTH, c, KEYS, BLOCK, first, STEP)
            query_rows = load_queries(q, q_start, row, start - s + t, c, t, d, CHUNK, KEYS)
            sums += product(query_rows, state, PRECISION)
        sums *= load_rows(reading, head, tokens, start, CHUNK, BLOCK, first, STEP) * scale
        cotangent = load_queries(d_o, d_o_start, row, start - s + t, first, t, e, CHUNK, BLOCK)
        sums *= cotangent.to(tl.float32)
        store_rows(query_products, head * queries + row, tokens, start, first, sums, STEP)


@triton.jit
def channel_gate_gradient(
    d_gates, query_products, key_products, erase_products, overlap, total, d_g, sizes, width,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, GATE_STEP: tl.constexpr,
):  # fmt: skip
    """Write dg (m, s, w), the sum of its parts.

    `d_gates` (m, T, w) is the part of pairs of tokens, already per gate. `query_products` (m r, T,
    w) and `key_products` (m, T, w) are the parts of reads of the state before the chunk and of
    writes to the state after it; `overlap` (m, chunks, w) is the part of the state itself. With the
    delta rule, `erase_products` (m, T, w) is subtracted from the reads.
    """
    queries, s, tokens = sizes.queries, sizes.s, sizes.tokens
    BLOCKS: tl.constexpr = GATE_STEP // BLOCK
    head = tl.program_id(1).to(tl.int64)
    chunk, first = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * BLOCK
    start = chunk * CHUNK
    position, channel = tl.arange(0, CHUNK), first + tl.arange(0, BLOCK)
    reads = tl.zeros((CHUNK, BLOCK), tl.float32)
    for row in range(queries):
        query = head * queries + row
        reads += load_rows(query_products, query, tokens, start, CHUNK, BLOCK, first, GATE_STEP)
    if erase_products is not None:
        reads -= load_rows(erase_products, head, tokens, start, CHUNK, BLOCK, first, GATE_STEP)
    # The sum over the tokens before each.
    at = (head * tokens + start + position[:, None] - 1) * GATE_STEP + channel[None, :]
    writes = tl.load(key_products + at, mask=(position > 0)[:, None], other=0.0)
    at = (head * (tokens // CHUNK) + chunk) * GATE_STEP + channel
    d_total = tl.load(overlap + at) * tl.load(total + at)
    d_gate_rows = load_rows(d_gates, head, tokens, start, CHUNK, BLOCK, first, GATE_STEP)
    d_gate_rows += tl.cumsum(reads, axis=0, reverse=True) + tl.cumsum(writes, axis=0)
    at = (head * s + start + position[:, None]) * width + channel[None, :]
    inside = (start + position < s)[:, None] & (channel < width)[None, :]
    tl.store(d_g + at, d_gate_rows + d_total[None, :], mask=inside)
