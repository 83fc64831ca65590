"""The decay factors of a chunk: a few numbers per token.

    reading_i = e^{g_1 + … + g_i},    writing_j = e^{g_{j+1} + … + g_C},    total = reading_C

Keys that are erased from the state before its decay are read with reading_{i−1}.

The delta rule computes them in its own pass over the keys (`delta_rule.py`). Grid: one program per
chunk of one head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.recurrence.chunk_tiles import head_of

LOWEST = tl.constexpr(-200.0)
"""A gate whose exponential is 0 in float32, like that of −∞."""


@triton.jit
def gates_of(g, token, stride, mask):
    """The gates of some tokens of a head, 0 outside the mask."""
    loaded = tl.load(g + token * stride, mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, tl.maximum(loaded, LOWEST), 0.0)


@triton.jit
def factors_of(
    g, gates, reading, erasing, writing, total, at, chunk, start, s, stride, CHUNK: tl.constexpr
):  # fmt: skip
    """Write the factors of the chunk that begins at `start`, from the gates `g` of its head.

    They are stored at `at` of `gates`, `reading`, `erasing` and `writing`, and at `chunk` of
    `total`. The decay from before the chunk to when each token erases is returned, and `writing`.
    """
    position = tl.arange(0, CHUNK)
    token = (start + position).to(tl.int64)
    loaded = gates_of(g, token, stride, token < s)
    # The gate of the next token, in the same chunk.
    has_next = (position + 1 < CHUNK) & (token + 1 < s)
    following = gates_of(g, token + 1, stride, has_next)
    until_now = tl.exp(tl.cumsum(loaded, axis=0))
    until_end = tl.exp(tl.cumsum(following, axis=0, reverse=True))
    tl.store(gates + at, loaded)
    tl.store(reading + at, until_now)
    tl.store(writing + at, until_end)
    tl.store(total + chunk, tl.exp(tl.sum(loaded, axis=0)))
    if erasing is not None:
        preceding = gates_of(g, token - 1, stride, (position > 0) & (token - 1 < s))
        until_now = tl.exp(tl.cumsum(preceding, axis=0))
        tl.store(erasing + at, until_now)
    return until_now, until_end


@triton.jit
def load_factors(
    g,
    gates,
    reading,
    writing,
    total,
    heads,
    s,
    tokens,
    g_strides,
    CHUNK: tl.constexpr,
):
    """Write g to `gates`, reading, writing (m, T) and total (m, chunks)."""
    head = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0) * CHUNK
    at = head * tokens + start + tl.arange(0, CHUNK)
    chunk = head * tl.num_programs(0) + tl.program_id(0)
    g = head_of(g, head, heads, g_strides)
    factors_of(g, gates, reading, None, writing, total, at, chunk, start, s, g_strides.token, CHUNK)
