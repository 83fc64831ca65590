"""The moments of keys in front of every chunk, of which CCQ's covariance is made.

    A = Σ k̄ k̄ᵀ,    m = Σ k̄,    n = Σ 1,

over the tokens so far that count, of the same segment. They are sums without a decay: what is in
front of a chunk and what a chunk adds have nothing to do with one another, and so they can be made
in the pass over the keys that a backbone makes anyway (`chunk_states.py`), or in one of their own,
which is here. A program has a block of columns of A and of m, of one head: 2 T d² FLOPs a head.

In memory A stands in the dtype of the factors that it becomes (`factor_dtype`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.recurrence.chunk_tiles import head_of, product
from precondattn_triton.tiles import load_tokens


@triton.jit
def counted(valid, head, heads, start, s, CHUNK: tl.constexpr):
    """1 for each token of a chunk that is there and counts, 0 for the others."""
    token = start + tl.arange(0, CHUNK)
    there = token < s
    if valid is not None:
        there = there & (tl.load(valid + head // heads * s + token, mask=there, other=0) != 0)
    return there.to(tl.float32)


@triton.jit
def store_moments(
    moments, sums, counts, at, first, is_own, second, mean, number, WIDTH: tl.constexpr
):  # fmt: skip
    """Columns `first` … of the moments in front of chunk `at`, if they are this program's own."""
    column = first + tl.arange(0, second.shape[1])
    own = is_own & (column < WIDTH)
    place = tl.arange(0, WIDTH)[:, None] * WIDTH + column[None, :]
    start_of = moments + at * WIDTH * WIDTH
    tl.store(start_of + place, second.to(moments.dtype.element_ty), mask=own[None, :])
    tl.store(sums + at * WIDTH + column, mean, mask=own)
    once = is_own & (first + tl.arange(0, 1) == 0)
    tl.store(counts + at + tl.arange(0, 1), number, mask=once)


@triton.jit
def moments_behind(
    second, mean, number, keys, scale, unit, valid, writing, total, moments,
    head, heads, index, tokens, first, s, d,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The moments behind a chunk, of those in front of it.

    `keys` (C, d) are the chunk's k̄, or, with their inverse lengths as `scale`, its k. Where there
    are segments, `writing` is 1 for tokens of that which the chunk ends in, and `total` for a chunk
    that is all of one with what is in front.
    """
    start = index * CHUNK
    place = head * tokens + start + tl.arange(0, CHUNK)
    start_of = unit + (head // heads * s * heads + head % heads) * d
    own = load_tokens(start_of, start, first, s, d, heads * d, 1, CHUNK, BLOCK).to(tl.float32)
    counts = counted(valid, head, heads, start, s, CHUNK)
    if total is not None:
        writes = tl.load(writing + place)
        own *= writes[:, None]
        counts *= writes
        kept = tl.load(total + head * (tokens // CHUNK) + index)
        second *= kept
        mean *= kept
        number *= kept
    mean += tl.sum(own, axis=0)
    number += tl.sum(counts, axis=0)
    if scale is not None:
        own *= tl.load(scale + place)[:, None]
    if keys.dtype != tl.float32:
        own = own.to(moments.dtype.element_ty)
    second += product(tl.trans(keys), own, PRECISION)
    return second, mean, number


@triton.jit
def carry_moments(
    k,
    valid,
    writing,
    total,
    moments,
    sums,
    counts,
    heads,
    s,
    tokens,
    d,
    k_b,
    k_m,
    k_s,
    k_d,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`moments` (m, chunks, WIDTH, WIDTH), `sums` (m, chunks, WIDTH) and `counts` (m, chunks).

    k (b, s, m, d) has rows of length 1, or 0, and is in one piece.
    """
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK
    start_of = head_of(k, head, heads, k_b, k_m, 1)
    second = tl.zeros((WIDTH, BLOCK), tl.float32)
    mean = tl.zeros((BLOCK,), tl.float32)
    number = tl.zeros((1,), tl.float32)
    for index in range(tokens // CHUNK):
        at = head * (tokens // CHUNK) + index
        store_moments(moments, sums, counts, at, first, True, second, mean, number, WIDTH)
        keys = load_tokens(start_of, index * CHUNK, 0, s, d, k_s, k_d, CHUNK, WIDTH)
        second, mean, number = moments_behind(
            second, mean, number, keys, None, k, valid, writing, total, moments,
            head, heads, index, tokens, first, s, d, CHUNK, BLOCK, PRECISION,
        )  # fmt: skip
