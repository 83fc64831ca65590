"""How the tokens of a chunk fade from one another, with a decay for each channel.

    F(A, x, y) = Σ_{i≥j,c} A_ij x_ic y_jc D_ijc,    D_ijc = e^{g_{j+1,c} + … + g_ic}.

D is a factor of every channel of a product and not of the product, and so a chunk is cut into
sub-chunks of 16 tokens. Between tokens of different ones D factors about a border m between them,

    D_ijc = e^{g_mc + … + g_ic} e^{g_{j+1,c} + … + g_{m−1,c}}    (j < m ≤ i),

with both exponents ≤ 0, and the rest are products of matrices; within a sub-chunk D is multiplied
as it is, one token j after the other. As in `chunk_tiles.py` every exponent is a sum of gates, and
none is a difference.

F's derivative with respect to A is the scores of x and y (`channel_scores`); those with respect to
x, y and g are `channel_gradient`'s. The gate of token t in sub-chunk a has the pairs j < t ≤ i:
both in a, or j in front of it (i in a or behind), or i behind it and j in a.

Here x (b, m, t, r, w) is like queries and y (b, m, s, w) like keys, where they lie; the rest is
scratch. A token costs 16 exponentials for each channel, and 32 where the gradient is asked for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.recurrence.chunk_tiles import head_of, store_rows
from precondattn_triton.tiles import load_rows, load_tokens

SUB = tl.constexpr(16)
"""Tokens of a sub-chunk."""


@triton.jit
def fading_since(
    gates, head, tokens, start, low, first,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """e^{g_low + … + g_i} of rows i ≥ low of a tile that begins at `start`, 0 in the others."""
    counts = (tl.arange(0, ROWS) >= low)[:, None]
    own = load_rows(gates, head, tokens, start, ROWS, WIDTH, first, STEP)
    total = tl.cumsum(tl.where(counts, own, 0.0), axis=0)
    return tl.where(counts, tl.exp(total), 0.0)


@triton.jit
def fading_until(
    gates, head, tokens, start, high, first,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """e^{g_{j+1} + … + g_{high−1}} of rows j < high of a tile, 0 in the others."""
    row = tl.arange(0, ROWS)
    at = (head * tokens + start).to(tl.int64) + row + 1
    at = gates + at[:, None] * STEP + first + tl.arange(0, WIDTH)[None, :]
    behind = tl.load(at, mask=(row + 1 < high)[:, None], other=0.0)
    total = tl.cumsum(behind, axis=0, reverse=True)
    return tl.where((row < high)[:, None], tl.exp(total), 0.0)


@triton.jit
def gates_behind(gates, head, tokens, start, j, first, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """Those of token j + 1 of the sub-chunk that begins at `start`; 0 behind its last."""
    at = (head * tokens + start).to(tl.int64) + j + 1
    place = first + tl.arange(0, WIDTH)
    return tl.load(gates + at * STEP + place, mask=(place >= 0) & (j + 1 < SUB), other=0.0)


@triton.jit
def one_token(y, token, first, s, width, y_s, y_c, WIDTH: tl.constexpr):
    """Some channels of one of y, in float32."""
    channel = (first + tl.arange(0, WIDTH)).to(tl.int64)
    there = (channel < width) & (token < s)
    return tl.load(y + token * y_s + channel * y_c, mask=there, other=0.0).to(tl.float32)


@triton.jit
def channel_scores(
    x,
    y,
    gates,
    scores,
    heads,
    queries,
    s,
    t,
    tokens,
    width,
    scale,
    x_b,
    x_m,
    x_t,
    x_r,
    x_c,
    y_b,
    y_m,
    y_s,
    y_c,
    y_group,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    GATE_STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`scores` (m r, T, CHUNK) gets s dF/dA of one x of each token, 0 above the diagonal.

    A program has the rows of one sub-chunk.
    """
    SUBS: tl.constexpr = CHUNK // SUB
    query = tl.program_id(1).to(tl.int64)
    head, row = query // queries, query % queries
    start, low = tl.program_id(0) // SUBS * CHUNK, tl.program_id(0) % SUBS * SUB
    x = head_of(x, head, heads, x_b, x_m, 1) + row * x_r
    y = head_of(y, head, heads, y_b, y_m, y_group)
    place, column = tl.arange(0, SUB), tl.arange(0, CHUNK)
    earlier = tl.zeros((SUB, CHUNK), tl.float32)
    among = tl.zeros((SUB, SUB), tl.float32)
    for c in range(0, GATE_STEP, BLOCK):
        own = load_tokens(x, start + low - s + t, c, t, width, x_t, x_c, SUB, BLOCK)
        own = own.to(tl.float32)
        since = fading_since(gates, head, tokens, start + low, 0, c, SUB, BLOCK, GATE_STEP)
        until = fading_until(gates, head, tokens, start, low, c, CHUNK, BLOCK, GATE_STEP)
        others = load_tokens(y, start, c, s, width, y_s, y_c, CHUNK, BLOCK).to(tl.float32)
        faded = tl.trans(others * until)
        earlier += tl.dot(own * since, faded, input_precision=PRECISION)
        exponent = tl.zeros((SUB, BLOCK), tl.float32)
        for back in range(SUB):
            j = SUB - 1 - back
            behind = gates_behind(gates, head, tokens, start + low, j, c, BLOCK, GATE_STEP)
            exponent += tl.where((place > j)[:, None], behind[None, :], 0.0)
            other = one_token(y, start + low + j, c, s, width, y_s, y_c, BLOCK)
            found = tl.sum(own * tl.exp(exponent) * other[None, :], axis=1)
            here = (place[None, :] == j) & (place[:, None] >= j)
            among += tl.where(here, found[:, None], 0.0)
    rows = (query * tokens + start + low + place)[:, None] * CHUNK
    outside = (column < low) | (column >= low + SUB)
    tl.store(scores + rows + column[None, :], earlier * scale, mask=outside[None, :])
    tl.store(scores + rows + low + place[None, :], among * scale)


@triton.jit
def channel_gradient(
    x,
    y,
    gates,
    pairs,
    d_x,
    d_y,
    d_gates,
    heads,
    queries,
    s,
    t,
    tokens,
    width,
    x_b,
    x_m,
    x_t,
    x_r,
    x_c,
    y_b,
    y_m,
    y_s,
    y_c,
    y_group,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    GATE_STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`d_x` (m r, T, GATE_STEP), and, where there is an x, `d_y` and `d_gates` (m, T, GATE_STEP).

    `pairs` (m r, T, CHUNK) is A. A program has one sub-chunk and a block of channels.
    """
    SUBS: tl.constexpr = CHUNK // SUB
    BLOCKS: tl.constexpr = GATE_STEP // BLOCK
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) % BLOCKS * BLOCK
    part = tl.program_id(0) // BLOCKS
    start, low = part // SUBS * CHUNK, part % SUBS * SUB
    if x is not None:
        x = head_of(x, head, heads, x_b, x_m, 1)
    y = head_of(y, head, heads, y_b, y_m, y_group)
    place, token = tl.arange(0, SUB), tl.arange(0, CHUNK)
    is_before, is_behind = token < low, token >= low + SUB
    others = load_tokens(y, start, first, s, width, y_s, y_c, CHUNK, BLOCK).to(tl.float32)
    others *= fading_until(gates, head, tokens, start, low, first, CHUNK, BLOCK, GATE_STEP)
    since = fading_since(gates, head, tokens, start + low, 0, first, SUB, BLOCK, GATE_STEP)
    d_own = tl.zeros((SUB, BLOCK), tl.float32)
    d_far = tl.zeros((SUB, BLOCK), tl.float32)
    d_gate = tl.zeros((SUB, BLOCK), tl.float32)
    for row in range(queries):
        query = head * queries + row
        a = load_rows(pairs, query, tokens, start + low, SUB, CHUNK, 0, CHUNK)
        a = tl.where(is_before[None, :], a, 0.0)
        found = tl.dot(a, others, input_precision=PRECISION) * since
        if x is not None:
            queries_of = x + row * x_r
            own = load_tokens(
                queries_of, start + low - s + t, first, t, width, x_t, x_c, SUB, BLOCK
            ).to(tl.float32)
            later = load_tokens(
                queries_of, start - s + t, first, t, width, x_t, x_c, CHUNK, BLOCK
            ).to(tl.float32)
            # Pairs across the sub-chunk: all of its gates are in each.
            a = load_rows(pairs, query, tokens, start, CHUNK, CHUNK, 0, CHUNK)
            a = tl.where(is_behind[:, None] & is_before[None, :], a, 0.0)
            across = tl.dot(a, others, input_precision=PRECISION) * later
            across *= fading_since(gates, head, tokens, start, low, first, CHUNK, BLOCK, GATE_STEP)
            d_gate += tl.sum(across, axis=0)[None, :]
            d_gate += tl.cumsum(own * found, axis=0, reverse=True)
            a = load_rows(pairs, query, tokens, start, CHUNK, SUB, low, CHUNK)
            a = tl.where(is_behind[:, None], a, 0.0)
            later *= fading_since(
                gates, head, tokens, start, low + SUB, first, CHUNK, BLOCK, GATE_STEP
            )
            d_far += tl.dot(tl.trans(a), later, input_precision=PRECISION)
        exponent = tl.zeros((SUB, BLOCK), tl.float32)
        for back in range(SUB):
            j = SUB - 1 - back
            behind = gates_behind(gates, head, tokens, start + low, j, first, BLOCK, GATE_STEP)
            exponent += tl.where((place > j)[:, None], behind[None, :], 0.0)
            at = (query * tokens + start + low + place) * CHUNK + low + j
            weights = tl.load(pairs + at)[:, None] * tl.exp(exponent)
            weights = tl.where((place >= j)[:, None], weights, 0.0)
            other = one_token(y, start + low + j, first, s, width, y_s, y_c, BLOCK)
            found += weights * other[None, :]
            if x is not None:
                pulled = own * weights
                d_other = tl.sum(pulled, axis=0)
                d_own += tl.where((place == j)[:, None], d_other[None, :], 0.0)
                pulled = tl.where((place > j)[:, None], pulled * other[None, :], 0.0)
                crossed = tl.cumsum(pulled, axis=0, reverse=True)
                d_gate += tl.where((place > j)[:, None], crossed, 0.0)
        store_rows(d_x, query, tokens, start + low, first, found, GATE_STEP)
    if x is not None:
        d_far *= fading_until(gates, head, tokens, start + low, SUB, first, SUB, BLOCK, GATE_STEP)
        own = load_tokens(y, start + low, first, s, width, y_s, y_c, SUB, BLOCK)
        crossed = own.to(tl.float32) * d_far
        d_gate += tl.cumsum(crossed, axis=0) - crossed
        store_rows(d_y, head, tokens, start + low, first, d_own + d_far, GATE_STEP)
        store_rows(d_gates, head, tokens, start + low, first, d_gate, GATE_STEP)
