"""The decay factors of a chunk with a gate per channel, and the gradient of the gates.

    reading_i = e^{g_1 + … + g_i},    writing_j = e^{g_{j+1} + … + g_C},    total = reading_C

As in `gate_sums.py`, but with rows (m, T, w) instead of numbers. Grid: one program per chunk and
block of channels of one head.
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
from precondattn_triton.recurrence.gate_sums import LOWEST
from precondattn_triton.tiles import load_rows


@triton.jit
def load_channel_factors(
    g,
    reading,
    writing,
    total,
    heads,
    s,
    tokens,
    width,
    g_strides,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    GATE_STEP: tl.constexpr,
):
    """Write reading, writing (m, T, w) and total (m, chunks, w)."""
    BLOCKS: tl.constexpr = GATE_STEP // BLOCK
    head = tl.program_id(1).to(tl.int64)
    chunk, first = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * BLOCK
    start = chunk * CHUNK
    g = head_of(g, head, heads, g_strides)
    loaded = load_head(g, start, first, s, width, g_strides, CHUNK, BLOCK).to(tl.float32)
    loaded = tl.maximum(loaded, LOWEST)
    # The gates of the next token, in the same chunk.
    following = load_head(g, start + 1, first, s, width, g_strides, CHUNK, BLOCK).to(tl.float32)
    has_next = tl.arange(0, CHUNK) + 1 < CHUNK
    following = tl.where(has_next[:, None], tl.maximum(following, LOWEST), 0.0)
    since, until = tl.cumsum(loaded, axis=0), tl.cumsum(following, axis=0, reverse=True)
    store_rows(reading, head, tokens, start, first, tl.exp(since), GATE_STEP)
    store_rows(writing, head, tokens, start, first, tl.exp(until), GATE_STEP)
    at = (head * (tokens // CHUNK) + chunk) * GATE_STEP + first + tl.arange(0, BLOCK)
    tl.store(total + at, tl.exp(tl.sum(loaded, axis=0)))


@triton.jit
def sums_of_values(
    q,
    k,
    v,
    d_o,
    reading,
    writing,
    states,
    d_states,
    query_products,
    key_products,
    overlap,
    heads,
    queries,
    s,
    t,
    tokens,
    d,
    e,
    scale,
    q_strides,
    k_strides,
    v_strides,
    o_strides,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The sums from which the gradient of gates per value channel is computed.

    `query_products` (m r, T, STEP) gets s reading ∘ Q S ∘ dO, `key_products` (m, T, STEP) gets
    writing ∘ K dS ∘ V, and `overlap` (m, chunks, STEP) gets Σ S ∘ dS over key channels.
    """
    BLOCKS: tl.constexpr = STEP // BLOCK
    head = tl.program_id(1).to(tl.int64)
    chunk, first = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * BLOCK
    start, at = chunk * CHUNK, head * (tokens // CHUNK) + chunk
    q = head_of(q, head, heads, q_strides)
    k = head_of(k, head, heads, k_strides)
    v = head_of(v, head, heads, v_strides)
    d_o = head_of(d_o, head, heads, o_strides)
    sums = tl.zeros((CHUNK, BLOCK), tl.float32)
    both = tl.zeros((BLOCK,), tl.float32)
    for c in range(0, WIDTH, KEYS):
        state = load_rows(states, at, WIDTH, c, KEYS, BLOCK, first, STEP)
        d_state = load_rows(d_states, at, WIDTH, c, KEYS, BLOCK, first, STEP)
        both += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), axis=0)
        keys = load_head(k, start, c, s, d, k_strides, CHUNK, KEYS)
        sums += product(keys, d_state, PRECISION)
    tl.store(overlap + at * STEP + first + tl.arange(0, BLOCK), both)
    sums *= load_rows(writing, head, tokens, start, CHUNK, BLOCK, first, STEP)
    sums *= load_head(v, start, first, s, e, v_strides, CHUNK, BLOCK).to(tl.float32)
    store_rows(key_products, head, tokens, start, first, sums, STEP)
    for row in range(queries):
        sums = tl.zeros((CHUNK, BLOCK), tl.float32)
        for c in range(0, WIDTH, KEYS):
            state = load_rows(states, at, WIDTH, c, KEYS, BLOCK, first, STEP)
            query_rows = load_queries(q, row, start - s + t, c, t, d, q_strides, CHUNK, KEYS)
            sums += product(query_rows, state, PRECISION)
        sums *= load_rows(reading, head, tokens, start, CHUNK, BLOCK, first, STEP) * scale
        cotangent = load_queries(d_o, row, start - s + t, first, t, e, o_strides, CHUNK, BLOCK)
        sums *= cotangent.to(tl.float32)
        store_rows(query_products, head * queries + row, tokens, start, first, sums, STEP)


@triton.jit
def channel_gate_gradient(
    d_gates,
    query_products,
    key_products,
    erase_products,
    overlap,
    total,
    d_g,
    s,
    tokens,
    queries,
    width,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    GATE_STEP: tl.constexpr,
):
    """Write dg (m, s, w), the sum of its parts.

    `d_gates` (m, T, w) is the part of pairs of tokens, already per gate. `query_products` (m r, T,
    w) and `key_products` (m, T, w) are the parts of reads of the state before the chunk and of
    writes to the state after it; `overlap` (m, chunks, w) is the part of the state itself. With the
    delta rule, `erase_products` (m, T, w) is subtracted from the reads.
    """
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
