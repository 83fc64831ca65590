"""The decay factors of a chunk, and the gradients of gates and β: a few numbers per token.

    reading_i = e^{g_1 + … + g_i},    writing_j = e^{g_{j+1} + … + g_C},    total = reading_C

Keys that are erased from the state before its decay are read with reading_{i−1}.

The gradient of a gate is a sum over everything that it decays: pairs of tokens (`crossing`), reads
of the state before the chunk (`read`), writes to the state after it (`written`), and the state
itself from before to after the chunk (`overlap`). Grid: one program per chunk of one head.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-200.0)
"""A gate whose exponential is 0 in float32, like that of −∞."""


@triton.jit
def load_factors(
    g,
    beta,
    gates,
    reading,
    erasing,
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
    """Write g to `gates`, reading, writing (m, T) and total (m, chunks); β to `strength` (m, T).

    `erasing` (m, T) gets reading_{i−1}, if it is not None. `g` or `beta` is None if there is none,
    and so are the outputs computed from it.
    """
    head = tl.program_id(1).to(tl.int64)
    b, n = head // heads, head % heads
    position = tl.arange(0, CHUNK)
    token = (tl.program_id(0) * CHUNK + position).to(tl.int64)
    if g is not None:
        at = g + b * g_b + n * g_m
        loaded = tl.load(at + token * g_s, mask=token < s, other=0.0).to(tl.float32)
        loaded = tl.maximum(loaded, LOWEST)
        # The gate of the next token, in the same chunk.
        has_next = (position + 1 < CHUNK) & (token + 1 < s)
        following = tl.load(at + (token + 1) * g_s, mask=has_next, other=0.0).to(tl.float32)
        following = tl.maximum(following, LOWEST)
        tl.store(gates + head * tokens + token, loaded)
        tl.store(reading + head * tokens + token, tl.exp(tl.cumsum(loaded, axis=0)))
        if erasing is not None:
            inside = (position > 0) & (token - 1 < s)
            preceding = tl.load(at + (token - 1) * g_s, mask=inside, other=0.0).to(tl.float32)
            preceding = tl.maximum(preceding, LOWEST)
            tl.store(erasing + head * tokens + token, tl.exp(tl.cumsum(preceding, axis=0)))
        until_end = tl.cumsum(following, axis=0, reverse=True)
        tl.store(writing + head * tokens + token, tl.exp(until_end))
        decay = tl.exp(tl.sum(loaded, axis=0))
        tl.store(total + head * tl.num_programs(0) + tl.program_id(0), decay)
    if beta is not None:
        at = beta + b * beta_b + n * beta_m + token * beta_s
        loaded = tl.load(at, mask=token < s, other=0.0).to(tl.float32)
        tl.store(strength + head * tokens + token, loaded)


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
    UNDECAYED: tl.constexpr,
):
    """Write dg and dβ (m, s); either may be None.

    `read` (m r, blocks, T), `written` and `from_keys` (m, blocks, T) are partial sums over blocks
    of key channels; `overlap` is (m, chunks, WIDTH). `crossing` (m r, T) and, with the delta rule,
    `crossing_keys` (m, T) are already per gate. `d_strength` (m, T) is dβ without `from_keys`.
    """
    head = tl.program_id(1).to(tl.int64)
    position = tl.arange(0, CHUNK)
    token = (tl.program_id(0) * CHUNK + position).to(tl.int64)
    from_state = tl.zeros((CHUNK,), tl.float32)
    if d_beta is not None:
        for block in range(KEY_BLOCKS):
            from_state += tl.load(from_keys + (head * KEY_BLOCKS + block) * tokens + token)
        d_beta_here = tl.load(d_strength + head * tokens + token) - from_state
        tl.store(d_beta + head * s + token, d_beta_here, mask=token < s)
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
            if UNDECAYED:
                # The gate of a token is in the reads of those after it.
                has_next = position + 1 < CHUNK
                from_state = tl.zeros((CHUNK,), tl.float32)
                for block in range(KEY_BLOCKS):
                    at = (head * KEY_BLOCKS + block) * tokens + token + 1
                    from_state += tl.load(from_keys + at, mask=has_next, other=0.0)
                beta = tl.load(strength + head * tokens + token + 1, mask=has_next, other=0.0)
                reads -= beta * from_state
            else:
                reads -= tl.load(strength + head * tokens + token) * from_state
        writes = tl.zeros((CHUNK,), tl.float32)
        for block in range(KEY_BLOCKS):
            # The sum over the tokens before each.
            at = (head * KEY_BLOCKS + block) * tokens + token - 1
            writes += tl.load(written + at, mask=position > 0, other=0.0)
        chunk = head * tl.num_programs(0) + tl.program_id(0)
        d_total = tl.load(overlap + chunk * WIDTH + tl.arange(0, WIDTH))
        d_total = tl.sum(d_total, axis=0) * tl.load(total + chunk)
        d_gate = crossed + tl.cumsum(reads, axis=0, reverse=True) + tl.cumsum(writes, axis=0)
        tl.store(d_g + head * s + token, d_gate + d_total, mask=token < s)
