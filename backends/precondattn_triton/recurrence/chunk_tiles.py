"""What the kernels of a recurrence in chunks have in common: how its tokens fade, and sums.

    D_ij = e^{g_{j+1} + … + g_i}  (j ≤ i),    reading_i = e^{g_1 + … + g_i},
    writing_j = e^{g_{j+1} + … + g_C},        total = e^{g_1 + … + g_C}.

Every exponent is the sum of the gates it consists of, and none is a difference of sums: a strong
gate costs the weak ones behind it no digits. A gate of −∞ comes as one of −200, of which float32's
exponential is 0 as well.

With m the heads of all sequences that have a state, T the tokens filled up to whole chunks of C,
and r queries to a state, kernels read q (b, heads, t, r, d), k (b, heads, s, d) and v (b, heads, s,
e) where they lie, with any strides; one head of these may serve several that have a state. The t
queries are those of the last tokens. Scratch is contiguous: rows (m, T, w), numbers (m, T), states
(m, chunks, w, W), with w and W the widths of keys and values filled up to whole tiles. Tokens that
fill up have k = 0, v = 0, q = 0, β = 0 and g = 0, so that scratch needs no mask.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a b in float32; factors of different dtypes are multiplied as float32."""
    if a.dtype != b.dtype:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def head_of(array, head, heads, stride_b, stride_m, group):
    """Where a head of a user's array begins; `group` heads with a state share one."""
    return array + head // heads * stride_b + head % heads // group * stride_m


@triton.jit
def store_rows(array, head, tokens, start, first, tile, STEP: tl.constexpr):
    """A tile as columns `first` … of rows `start` … of scratch (m, T, STEP)."""
    rows = (head * tokens + start).to(tl.int64) + tl.arange(0, tile.shape[0])
    at = rows[:, None] * STEP + first + tl.arange(0, tile.shape[1])[None, :]
    tl.store(array + at, tile.to(array.dtype.element_ty))


@triton.jit
def store_tokens(array, start, first, count, width, token_stride, tile):
    """A tile as some tokens and channels of one head of an output, as far as there are such."""
    token = start + tl.arange(0, tile.shape[0]).to(tl.int64)
    channel = first + tl.arange(0, tile.shape[1]).to(tl.int64)
    there = (token >= 0) & (token < count)
    inside = there[:, None] & (channel < width)[None, :]
    at = token[:, None] * token_stride + channel[None, :]
    tl.store(array + at, tile.to(array.dtype.element_ty), mask=inside)


@triton.jit
def pairs_of(g, place, SIZE: tl.constexpr, STRICT: tl.constexpr):
    """D of the tokens whose gates begin at `place`, 0 above, or, strictly, on the diagonal too.

    Without gates, 1 in place of D.
    """
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    seen = i > j if STRICT else i >= j
    fading = tl.full((SIZE, SIZE), 1.0, tl.float32)
    if g is not None:
        gates = tl.load(g + place + tl.arange(0, SIZE))
        # Down the column of token j the gates behind it add up.
        fading = tl.exp(tl.cumsum(tl.where(i > j, gates[:, None], 0.0), axis=0))
    return tl.where(seen, fading, 0.0)


@triton.jit
def crossing(pairs, SIZE: tl.constexpr):
    """The gates' gradient from Σ dx ∘ x over pairs (C, C): gate t is in the pairs j < t ≤ i."""
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    before = tl.cumsum(pairs, axis=1) - pairs
    return tl.sum(tl.where(i >= j, before, 0.0), axis=0)
