"""Products of pairs of tokens in a chunk, with a gate per channel (GLA, KDA, RWKV-6).

    F(A, x, y) = Σ_{i≥j,c} A_ij x_ic y_jc D_ijc,    D_ijc = e^{g_{j+1,c} + … + g_ic}.

D differs between the channels of a product, and cannot be applied to the product. So a chunk is
divided into sub-chunks of 16 tokens. Between tokens of different sub-chunks, D factors at a border
m between them,

    D_ijc = e^{g_mc + … + g_ic} e^{g_{j+1,c} + … + g_{m−1,c}}    (j < m ≤ i),

with both exponents ≤ 0, and F is a product of matrices. Within a sub-chunk, D is applied directly,
for one token j at a time. As in `chunk_tiles.py`, every exponent is a sum of gates, never a
difference.

`channel_scores` computes the derivative of F with respect to A, the scores of x and y;
`channel_gradient` computes those with respect to x, y and g. The gate of token t in sub-chunk a
affects the pairs j < t ≤ i: both in a, or j before a (i in a or after it), or i after a and j in a.

Here x (b, m, t, r, w) is like queries and y (b, m, s, w) like keys, with any strides; all else is
workspace. A token costs 16 exponentials per channel, 32 if the gradient is computed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.recurrence.chunk_tiles import head_of, store_rows
from precondattn_triton.tiles import load_rows, load_tokens

SUB = tl.constexpr(16)
"""Tokens of a sub-chunk."""


@triton.jit
def decay_since(
    gates, head, tokens, start, low, first,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """e^{g_low + … + g_i} for rows i ≥ low of a tile that begins at `start`, 0 in the others."""
    is_after = (tl.arange(0, ROWS) >= low)[:, None]
    loaded = load_rows(gates, head, tokens, start, ROWS, WIDTH, first, STEP)
    total = tl.cumsum(tl.where(is_after, loaded, 0.0), axis=0)
    return tl.where(is_after, tl.exp(total), 0.0)


@triton.jit
def decay_until(
    gates, head, tokens, start, high, first,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """e^{g_{j+1} + … + g_{high−1}} for rows j < high of a tile, 0 in the others."""
    row = tl.arange(0, ROWS)
    at = (head * tokens + start).to(tl.int64) + row + 1
    at = gates + at[:, None] * STEP + first + tl.arange(0, WIDTH)[None, :]
    following = tl.load(at, mask=(row + 1 < high)[:, None], other=0.0)
    total = tl.cumsum(following, axis=0, reverse=True)
    return tl.where((row < high)[:, None], tl.exp(total), 0.0)


@triton.jit
def gates_after(gates, head, tokens, start, j, first, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """The gates of token j + 1 of the sub-chunk that begins at `start`; 0 after its last token."""
    at = (head * tokens + start).to(tl.int64) + j + 1
    channel = first + tl.arange(0, WIDTH)
    return tl.load(gates + at * STEP + channel, mask=(channel >= 0) & (j + 1 < SUB), other=0.0)


@triton.jit
def one_token(y, token, first, s, width, y_s, y_c, WIDTH: tl.constexpr):
    """A block of channels of one token of y, in float32."""
    channel = (first + tl.arange(0, WIDTH)).to(tl.int64)
    is_present = (channel < width) & (token < s)
    return tl.load(y + token * y_s + channel * y_c, mask=is_present, other=0.0).to(tl.float32)


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
    x_group,
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
    """Write s dF/dA of one x per token to `scores` (m r, T, CHUNK), 0 above the diagonal.

    Grid: one program per sub-chunk, whose rows it computes, and per query of each token.
    """
    SUBS: tl.constexpr = CHUNK // SUB
    query = tl.program_id(1).to(tl.int64)
    head, row = query // queries, query % queries
    start, low = tl.program_id(0) // SUBS * CHUNK, tl.program_id(0) % SUBS * SUB
    x = head_of(x, head, heads, x_b, x_m, x_group) + row * x_r
    y = head_of(y, head, heads, y_b, y_m, y_group)
    position, column = tl.arange(0, SUB), tl.arange(0, CHUNK)
    earlier = tl.zeros((SUB, CHUNK), tl.float32)
    within_sub = tl.zeros((SUB, SUB), tl.float32)
    for c in range(0, GATE_STEP, BLOCK):
        x_rows = load_tokens(x, start + low - s + t, c, t, width, x_t, x_c, SUB, BLOCK)
        x_rows = x_rows.to(tl.float32)
        since = decay_since(gates, head, tokens, start + low, 0, c, SUB, BLOCK, GATE_STEP)
        until = decay_until(gates, head, tokens, start, low, c, CHUNK, BLOCK, GATE_STEP)
        others = load_tokens(y, start, c, s, width, y_s, y_c, CHUNK, BLOCK).to(tl.float32)
        decayed = tl.trans(others * until)
        earlier += tl.dot(x_rows * since, decayed, input_precision=PRECISION)
        exponent = tl.zeros((SUB, BLOCK), tl.float32)
        for back in range(SUB):
            j = SUB - 1 - back
            following = gates_after(gates, head, tokens, start + low, j, c, BLOCK, GATE_STEP)
            exponent += tl.where((position > j)[:, None], following[None, :], 0.0)
            other = one_token(y, start + low + j, c, s, width, y_s, y_c, BLOCK)
            products = tl.sum(x_rows * tl.exp(exponent) * other[None, :], axis=1)
            is_pair = (position[None, :] == j) & (position[:, None] >= j)
            within_sub += tl.where(is_pair, products[:, None], 0.0)
    rows = (query * tokens + start + low + position)[:, None] * CHUNK
    outside = (column < low) | (column >= low + SUB)
    tl.store(scores + rows + column[None, :], earlier * scale, mask=outside[None, :])
    tl.store(scores + rows + low + position[None, :], within_sub * scale)


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
    x_group,
    y_b,
    y_m,
    y_s,
    y_c,
    y_group,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    GATE_STEP: tl.constexpr,
    ADDS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write `d_x` (m r, T, GATE_STEP), and, with x, `d_y` and `d_gates` (m, T, GATE_STEP).

    `pairs` (m r, T, CHUNK) is A. With ADDS, `d_y` and `d_gates` are added to what is stored there.
    Grid: one program per sub-chunk, block of channels and head.
    """
    SUBS: tl.constexpr = CHUNK // SUB
    BLOCKS: tl.constexpr = GATE_STEP // BLOCK
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) % BLOCKS * BLOCK
    part = tl.program_id(0) // BLOCKS
    start, low = part // SUBS * CHUNK, part % SUBS * SUB
    if x is not None:
        x = head_of(x, head, heads, x_b, x_m, x_group)
    y = head_of(y, head, heads, y_b, y_m, y_group)
    position, token = tl.arange(0, SUB), tl.arange(0, CHUNK)
    is_before, is_after = token < low, token >= low + SUB
    others = load_tokens(y, start, first, s, width, y_s, y_c, CHUNK, BLOCK).to(tl.float32)
    others *= decay_until(gates, head, tokens, start, low, first, CHUNK, BLOCK, GATE_STEP)
    since = decay_since(gates, head, tokens, start + low, 0, first, SUB, BLOCK, GATE_STEP)
    d_y_within = tl.zeros((SUB, BLOCK), tl.float32)
    d_far = tl.zeros((SUB, BLOCK), tl.float32)
    d_gate = tl.zeros((SUB, BLOCK), tl.float32)
    for row in range(queries):
        query = head * queries + row
        a = load_rows(pairs, query, tokens, start + low, SUB, CHUNK, 0, CHUNK)
        a = tl.where(is_before[None, :], a, 0.0)
        d_x_rows = tl.dot(a, others, input_precision=PRECISION) * since
        if x is not None:
            queries_of = x + row * x_r
            rows = load_tokens(
                queries_of, start + low - s + t, first, t, width, x_t, x_c, SUB, BLOCK
            ).to(tl.float32)
            later = load_tokens(
                queries_of, start - s + t, first, t, width, x_t, x_c, CHUNK, BLOCK
            ).to(tl.float32)
            # Pairs across the sub-chunk: each has all gates of the sub-chunk.
            a = load_rows(pairs, query, tokens, start, CHUNK, CHUNK, 0, CHUNK)
            a = tl.where(is_after[:, None] & is_before[None, :], a, 0.0)
            across = tl.dot(a, others, input_precision=PRECISION) * later
            across *= decay_since(gates, head, tokens, start, low, first, CHUNK, BLOCK, GATE_STEP)
            d_gate += tl.sum(across, axis=0)[None, :]
            d_gate += tl.cumsum(rows * d_x_rows, axis=0, reverse=True)
            a = load_rows(pairs, query, tokens, start, CHUNK, SUB, low, CHUNK)
            a = tl.where(is_after[:, None], a, 0.0)
            later *= decay_since(
                gates, head, tokens, start, low + SUB, first, CHUNK, BLOCK, GATE_STEP
            )
            d_far += tl.dot(tl.trans(a), later, input_precision=PRECISION)
        exponent = tl.zeros((SUB, BLOCK), tl.float32)
        for back in range(SUB):
            j = SUB - 1 - back
            following = gates_after(gates, head, tokens, start + low, j, first, BLOCK, GATE_STEP)
            exponent += tl.where((position > j)[:, None], following[None, :], 0.0)
            at = (query * tokens + start + low + position) * CHUNK + low + j
            weights = tl.load(pairs + at)[:, None] * tl.exp(exponent)
            weights = tl.where((position >= j)[:, None], weights, 0.0)
            other = one_token(y, start + low + j, first, s, width, y_s, y_c, BLOCK)
            d_x_rows += weights * other[None, :]
            if x is not None:
                d_pair = rows * weights
                d_other = tl.sum(d_pair, axis=0)
                d_y_within += tl.where((position == j)[:, None], d_other[None, :], 0.0)
                d_pair = tl.where((position > j)[:, None], d_pair * other[None, :], 0.0)
                crossed = tl.cumsum(d_pair, axis=0, reverse=True)
                d_gate += tl.where((position > j)[:, None], crossed, 0.0)
        store_rows(d_x, query, tokens, start + low, first, d_x_rows, GATE_STEP)
    if x is not None:
        d_far *= decay_until(gates, head, tokens, start + low, SUB, first, SUB, BLOCK, GATE_STEP)
        rows = load_tokens(y, start + low, first, s, width, y_s, y_c, SUB, BLOCK)
        crossed = rows.to(tl.float32) * d_far
        d_gate += tl.cumsum(crossed, axis=0) - crossed
        d_far += d_y_within
        if ADDS:
            at = start + low
            d_far += load_rows(d_y, head, tokens, at, SUB, BLOCK, first, GATE_STEP)
            d_gate += load_rows(d_gates, head, tokens, at, SUB, BLOCK, first, GATE_STEP)
        store_rows(d_y, head, tokens, start + low, first, d_far, GATE_STEP)
        store_rows(d_gates, head, tokens, start + low, first, d_gate, GATE_STEP)
