"""Products of pairs of tokens in a chunk, with a gate per channel (GLA, KDA, RWKV-6).

    F(A, x, y) = Σ_{i≥j,c} A_ij x_ic y_jc D_ijc,    D_ijc = e^{g_{j+1,c} + … + g_ic}.

D differs between the channels of a product, and cannot be applied to the product. So the pairs of
different tokens are divided among the halvings of the chunk: those of level l are in the two halves
of one block of 2^(l+1) tokens. Relative to the middle of the block, D is a product,

    D_ijc = f_ic f_jc,    f = e^{E g},

with E_it = 1 where gate t is between token i and the middle, and otherwise 0. As in
`chunk_tiles.py`, every exponent is a sum of gates, never a difference, and none is positive. A
token is either in the second half of its block, as i, or in the first, as j. One tile serves both:

    z = f ∘ x  (second half),  f ∘ y  (first half).

All blocks of a level are one product of the chunk, in which the other pairs are masked: the scores
of x and y, dF/dA, are those of z zᵀ. With B the part of A + Aᵀ between the halves, and p = B z,

    dF/dx = f ∘ p  (second half),    dF/dy = f ∘ p  (first half),    dF/dg = Eᵀ (p ∘ z),

because a pair's part of F is also its part of the gradient of every gate between its tokens. A
chunk of C tokens has log₂ C levels, and a token with itself has D = 1.

Here x (b, m, t, r, w) is like queries and y (b, m, s, w) like keys, with any strides; so are the
gates g (b, m, s, w). All else is workspace. With the delta rule, the keys that are erased are a
second x, whose z is another tile of the same f. For a token and channel, a level takes one
exponential and 2 C FLOPs for each z, forward and backward, and twice that for E g and for
Eᵀ (p ∘ z), whose rows are sums of two numbers in bfloat16 (`sums_over`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.recurrence.chunk_tiles import (
    as_factor,
    head_of,
    load_head,
    load_queries,
    product,
    store_rows,
)
from precondattn_triton.recurrence.decay_factors import LOWEST
from precondattn_triton.tiles import load_rows


@triton.jit
def channel_gates_of(
    g, head, heads, start, first, s, width, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """The gates of a chunk (CHUNK, BLOCK) in float32; 0 outside the sequence."""
    g_start = head_of(g, head, heads)
    gates = load_head(g, g_start, start, first, s, width, CHUNK, BLOCK).to(tl.float32)
    return tl.maximum(gates, LOWEST)


@triton.jit
def is_second_half(token, level):
    """Whether a token is in the second half of its block."""
    return ((token >> level) & 1) == 1


@triton.jit
def between(token, gate, level):
    """E of a level: whether a gate is between a token and the middle of its block.

    A comparison with bounds of each token, which depend on the level: masks that do not depend on
    it would be computed once, and occupy registers.
    """
    half, is_second = token >> level, is_second_half(token, level)
    first = tl.where(is_second, half << level, token + 1)
    last = tl.where(is_second, token, ((half + 1) << level) - 1)
    return (first <= gate) & (gate <= last)


@triton.jit
def sums_over(which, rows, SPLIT: tl.constexpr, EXACT: tl.constexpr):
    """E rows, of E (CHUNK, CHUNK) and rows in float32 (CHUNK, BLOCK).

    E has no digits to round. If SPLIT, a row is the sum of two numbers in bfloat16.
    """
    if SPLIT:
        which = which.to(tl.bfloat16)
        high = rows.to(tl.bfloat16)
        low = (rows - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(which, high, tl.dot(which, low))
    return tl.dot(which.to(tl.float32), rows, input_precision=EXACT)


@triton.jit
def rounded_like(rows, like, ROUNDED: tl.constexpr):
    """Rows in float32; if ROUNDED, in the dtype of `like`."""
    return as_factor(rows, like) if ROUNDED else rows


@triton.jit
def channel_scores(
    x, y, erase, g, scores, erase_scores, decayed_x, decayed_y, reading, writing, total, sizes,
    width,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr, GATE_STEP: tl.constexpr,
    SPLIT: tl.constexpr, ROUNDED: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Write s dF/dA of one x per token to `scores` (m r, T, CHUNK), 0 above the diagonal.

    `erase_scores` (m, T, CHUNK), if not None, gets stril(D ∘ E yᵀ) with the keys E that are erased:
    `erase`, or y if that is None. `decayed_x` (m r, T, GATE_STEP), if not None, gets reading ∘ x,
    and `decayed_y` (m, T, GATE_STEP) writing ∘ y; `total` (m, chunks, GATE_STEP) is the decay of
    the chunk. `reading` and `writing` (m, T, GATE_STEP) get the factors, unless they are None. A
    chunk has 2^LEVELS tokens. Grid: one program per chunk, and per query of each token.
    """
    heads, queries, s = sizes.heads, sizes.queries, sizes.s
    t, tokens, scale = sizes.t, sizes.tokens, sizes.scale
    query = tl.program_id(1).to(tl.int64)
    head, row = query // queries, query % queries
    start = tl.program_id(0) * CHUNK
    x_start = head_of(x, head, heads) + row * x.row
    y_start = head_of(y, head, heads)
    if erase is not None:
        erase_start = head_of(erase, head, heads)
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
    if erase_scores is not None:
        erased_pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
    # A program reads its rows anew for every level, from the cache, and makes E once.
    for level in range(LEVELS):
        which = between(i, j, level)
        is_second = is_second_half(i, level)
        is_pair = tl.where(is_second, (i >> level) - 1, CHUNK) == (j >> level)
        squares = tl.zeros((CHUNK, CHUNK), tl.float32)
        if erase_scores is not None:
            erased_squares = tl.zeros((CHUNK, CHUNK), tl.float32)
        for c in range(0, GATE_STEP, BLOCK):
            gates = channel_gates_of(g, head, heads, start, c, s, width, CHUNK, BLOCK)
            decay = tl.exp(sums_over(which, gates, SPLIT, EXACT))
            rows = load_head(x, x_start, start - s + t, c, t, width, CHUNK, BLOCK)
            others = load_head(y, y_start, start, c, s, width, CHUNK, BLOCK).to(tl.float32)
            both = tl.where(is_second, rows.to(tl.float32), others)
            both = rounded_like(both * decay, y.array, ROUNDED)
            squares += product(both, tl.trans(both), PRECISION)
            if erase_scores is not None:
                both = others
                if erase is not None:
                    erased = load_head(erase, erase_start, start, c, s, width, CHUNK, BLOCK)
                    both = tl.where(is_second, erased.to(tl.float32), both)
                both = rounded_like(both * decay, y.array, ROUNDED)
                erased_squares += product(both, tl.trans(both), PRECISION)
        pairs += tl.where(is_pair, squares, 0.0)
        if erase_scores is not None:
            erased_pairs += tl.where(is_pair, erased_squares, 0.0)
    if erase_scores is not None and row == 0:
        store_rows(erase_scores, head, tokens, start, 0, erased_pairs, CHUNK)
    diagonal = tl.zeros((CHUNK,), tl.float32)
    for c in range(0, GATE_STEP, BLOCK):
        rows = load_head(x, x_start, start - s + t, c, t, width, CHUNK, BLOCK).to(tl.float32)
        others = load_head(y, y_start, start, c, s, width, CHUNK, BLOCK).to(tl.float32)
        diagonal += tl.sum(rows * others, axis=1)
        if decayed_x is not None:
            gates = channel_gates_of(g, head, heads, start, c, s, width, CHUNK, BLOCK)
            since = tl.exp(sums_over(j <= i, gates, SPLIT, EXACT))
            store_rows(decayed_x, query, tokens, start, c, rows * since, GATE_STEP)
            if row == 0:
                until = tl.exp(sums_over(j > i, gates, SPLIT, EXACT))
                store_rows(decayed_y, head, tokens, start, c, others * until, GATE_STEP)
                at = (head * (tokens // CHUNK) + tl.program_id(0)) * GATE_STEP + c
                tl.store(total + at + tl.arange(0, BLOCK), tl.exp(tl.sum(gates, axis=0)))
                if reading is not None:
                    store_rows(reading, head, tokens, start, c, since, GATE_STEP)
                    store_rows(writing, head, tokens, start, c, until, GATE_STEP)
    pairs = tl.where(i == j, diagonal[:, None], pairs)
    store_rows(scores, query, tokens, start, 0, pairs * scale, CHUNK)


@triton.jit
def pairs_of_both(array, head, tokens, start, like, CHUNK: tl.constexpr, NARROW: tl.constexpr):
    """stril(A) + its transpose, a factor, and the diagonal of A (CHUNK, 1), of a chunk."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    a = load_rows(array, head, tokens, start, CHUNK, CHUNK, 0, CHUNK).to(tl.float32)
    diagonal = tl.sum(tl.where(i == j, a, 0.0), axis=1)
    a = rounded_like(tl.where(i > j, a, 0.0), like, NARROW)
    return a + tl.trans(a), diagonal[:, None]


@triton.jit
def reads_of_level(
    pairs, both, decay, level, like,
    CHUNK: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """f ∘ p and p ∘ z of a level, from A + Aᵀ and z."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    is_pair = ((i >> level) ^ 1) == (j >> level)
    square = tl.where(is_pair, pairs, 0.0).to(pairs.dtype)
    sums = product(square, rounded_like(both, like, NARROW), PRECISION)
    return sums * decay, sums * both


@triton.jit
def channel_gradient(
    x, y, erase, g, pairs, erased_pairs, d_x, d_y, d_erase, d_gates, sizes, width,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr, GATE_STEP: tl.constexpr,
    SPLIT: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Write `d_x` (m r, T, GATE_STEP), and, with x, `d_y` and `d_gates` (m, T, GATE_STEP).

    `pairs` (m r, T, CHUNK) is A. With the delta rule, `erased_pairs` (m, T, CHUNK) is the A of the
    keys that are erased: `erase`, whose gradient is written to `d_erase` (m, T, GATE_STEP), or y if
    that is None, whose gradient is then the sum of both. Grid: one program per chunk, block of
    channels and head.
    """
    heads, queries, s, t, tokens = sizes.heads, sizes.queries, sizes.s, sizes.t, sizes.tokens
    BLOCKS: tl.constexpr = GATE_STEP // BLOCK
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) % BLOCKS * BLOCK
    start = tl.program_id(0) // BLOCKS * CHUNK
    if x is not None:
        x_start = head_of(x, head, heads)
    y_start = head_of(y, head, heads)
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    others = load_head(y, y_start, start, first, s, width, CHUNK, BLOCK).to(tl.float32)
    gates = channel_gates_of(g, head, heads, start, first, s, width, CHUNK, BLOCK)
    erased = others
    if erase is not None:
        erase_start = head_of(erase, head, heads)
        erased = load_head(erase, erase_start, start, first, s, width, CHUNK, BLOCK)
        erased = erased.to(tl.float32)
        d_erased = tl.zeros((CHUNK, BLOCK), tl.float32)
    d_others = tl.zeros((CHUNK, BLOCK), tl.float32)
    d_gate = tl.zeros((CHUNK, BLOCK), tl.float32)
    for row in range(queries):
        query = head * queries + row
        a, diagonal = pairs_of_both(pairs, query, tokens, start, y.array, CHUNK, NARROW)
        d_rows = diagonal * others
        rows = tl.zeros((CHUNK, BLOCK), tl.float32)
        if x is not None:
            rows = load_queries(x, x_start, row, start - s + t, first, t, width, CHUNK, BLOCK)
            rows = rows.to(tl.float32)
            d_others += diagonal * rows
        if erased_pairs is not None:
            # They are read once, with the first query.
            pairs_of_erase, diagonal = pairs_of_both(
                erased_pairs, head, tokens, start, y.array, CHUNK, NARROW
            )
            pairs_of_erase = tl.where(row == 0, pairs_of_erase, 0.0).to(pairs_of_erase.dtype)
        for level in range(LEVELS):
            decay = tl.exp(sums_over(between(i, j, level), gates, SPLIT, EXACT))
            is_second = is_second_half(i, level)
            both = tl.where(is_second, rows, others) * decay
            gradient, crossing = reads_of_level(
                a, both, decay, level, y.array, CHUNK, NARROW, PRECISION
            )
            d_rows += tl.where(is_second, gradient, 0.0)
            if x is not None:
                d_others += tl.where(is_second, 0.0, gradient)
                if erased_pairs is not None:
                    both = tl.where(is_second, erased, others) * decay
                    gradient, crossing_too = reads_of_level(
                        pairs_of_erase, both, decay, level, y.array, CHUNK, NARROW, PRECISION
                    )
                    crossing += crossing_too
                    if erase is not None:
                        d_erased += tl.where(is_second, gradient, 0.0)
                        gradient = tl.where(is_second, 0.0, gradient)
                    d_others += gradient
                d_gate += sums_over(between(j, i, level), crossing, SPLIT, EXACT)
        store_rows(d_x, query, tokens, start, first, d_rows, GATE_STEP)
    if erase is not None:
        store_rows(d_erase, head, tokens, start, first, d_erased, GATE_STEP)
    if x is not None:
        store_rows(d_y, head, tokens, start, first, d_others, GATE_STEP)
        store_rows(d_gates, head, tokens, start, first, d_gate, GATE_STEP)
