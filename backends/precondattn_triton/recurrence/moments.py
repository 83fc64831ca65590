"""The moments of the keys before every chunk, from which CCQ's covariance is computed.

    A = Σ k̄ k̄ᵀ,    m = Σ k̄,    n = Σ 1,

over the valid tokens so far of the same segment. They are sums without a decay: the contribution of
a chunk does not depend on the moments before it. They can therefore be computed in the backbone's
own pass over the keys (`chunk_states.py`), or in a separate pass, which is here. Grid: one program
per block of columns of A and m, of one head: 2 T d² FLOPs per head.

A is stored in the dtype of the factors that it is used as (`factor_dtype`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.recurrence.chunk_tiles import head_of, load_head, product
from precondattn_triton.tiles import load_tokens


@triton.jit
def counted(valid, head, heads, start, s, CHUNK: tl.constexpr):
    """1 for each valid token of a chunk, 0 for the others."""
    token = start + tl.arange(0, CHUNK)
    is_present = token < s
    if valid is not None:
        is_present = is_present & (
            tl.load(valid + head // heads * s + token, mask=is_present, other=0) != 0
        )
    return is_present.to(tl.float32)


@triton.jit
def store_moments(
    moments, sums, counts, at, first, is_owner, second, mean, number, WIDTH: tl.constexpr
):  # fmt: skip
    """Store columns `first` … of the moments before chunk `at`, if this program owns them."""
    column = first + tl.arange(0, second.shape[1])
    is_stored = is_owner & (column < WIDTH)
    offset = tl.arange(0, WIDTH)[:, None] * WIDTH + column[None, :]
    start_of = moments + at * WIDTH * WIDTH
    tl.store(start_of + offset, second.to(moments.dtype.element_ty), mask=is_stored[None, :])
    tl.store(sums + at * WIDTH + column, mean, mask=is_stored)
    is_first = is_owner & (first + tl.arange(0, 1) == 0)
    tl.store(counts + at + tl.arange(0, 1), number, mask=is_first)


@triton.jit
def moments_after(
    second, mean, number, keys, scale, unit, valid, writing, total, moments,
    head, heads, index, tokens, first, s, d,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The moments after a chunk, from those before it.

    `keys` (C, d) are the chunk's k̄, or its k, with inverse lengths `scale`. With segments,
    `writing` is 1 for tokens of the segment in which the chunk ends, and `total` is 1 for a chunk
    that is entirely in the segment of the token before it.
    """
    start = index * CHUNK
    at = head * tokens + start + tl.arange(0, CHUNK)
    start_of = unit + (head // heads * s * heads + head % heads) * d
    columns = load_tokens(start_of, start, first, s, d, heads * d, 1, CHUNK, BLOCK).to(tl.float32)
    counts = counted(valid, head, heads, start, s, CHUNK)
    if total is not None:
        writes = tl.load(writing + at)
        columns *= writes[:, None]
        counts *= writes
        decay = tl.load(total + head * (tokens // CHUNK) + index)
        second *= decay
        mean *= decay
        number *= decay
    mean += tl.sum(columns, axis=0)
    number += tl.sum(counts, axis=0)
    if scale is not None:
        columns *= tl.load(scale + at)[:, None]
    if keys.dtype != tl.float32:
        columns = columns.to(moments.dtype.element_ty)
    second += product(tl.trans(keys), columns, PRECISION)
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
    k_strides,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write `moments` (m, chunks, WIDTH, WIDTH), `sums` (m, chunks, WIDTH), `counts` (m, chunks).

    k (b, s, m, d) has rows of length 1 or 0, and is contiguous.
    """
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK
    start_of = head_of(k, head, heads, k_strides)
    second = tl.zeros((WIDTH, BLOCK), tl.float32)
    mean = tl.zeros((BLOCK,), tl.float32)
    number = tl.zeros((1,), tl.float32)
    for index in range(tokens // CHUNK):
        at = head * (tokens // CHUNK) + index
        store_moments(moments, sums, counts, at, first, True, second, mean, number, WIDTH)
        keys = load_head(start_of, index * CHUNK, 0, s, d, k_strides, CHUNK, WIDTH)
        second, mean, number = moments_after(
            second, mean, number, keys, None, k, valid, writing, total, moments,
            head, heads, index, tokens, first, s, d, CHUNK, BLOCK, PRECISION,
        )  # fmt: skip
