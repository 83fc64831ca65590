"""The moments of the keys before every chunk, from which CCQ's covariance is computed.

    A = Σ k̄ k̄ᵀ,    m = Σ k̄,    n = Σ 1,

over the valid tokens so far of the same segment. They are sums without a decay: the contribution of
a chunk does not depend on the moments before it. They can therefore be computed in the backbone's
own pass over the keys (`chunk_states.py`), or in a separate pass, which is here. Grid: one program
per block of columns of A and m, of one head: 2 T d² FLOPs per head.

A is stored in the dtype of the factors that it is used as (`factor_dtype`).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from precondattn_triton.recurrence.chunk_tiles import head_of, load_head, product
from precondattn_triton.tiles import load_tokens


class Moments(NamedTuple):
    """The moments before every chunk, and what they are computed from, as an argument of a kernel.

    With segments, `writing` is 1 for tokens of the segment in which their chunk ends, and `total`
    is 1 for a chunk that is entirely in the segment of the token before it.
    """

    keys: Tensor
    """k̄ (b, s, m, d), contiguous, with rows of length 1 or 0"""
    scale: Tensor | None
    """The inverse lengths of keys (m, T) that are not k̄ in a product"""
    valid: Tensor | None
    """(b, s), bytes"""
    writing: Tensor | None
    """(m, T)"""
    total: Tensor | None
    """(m, chunks)"""
    second: Tensor
    """A (m, chunks, d, d), in the dtype of factors"""
    sums: Tensor
    """m (m, chunks, d)"""
    counts: Tensor
    """n (m, chunks)"""


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
def store_moments(moments, at, first, is_owner, second, mean, number, WIDTH: tl.constexpr):
    """Store columns `first` … of the moments before chunk `at`, if this program owns them."""
    column = first + tl.arange(0, second.shape[1])
    is_stored = is_owner & (column < WIDTH)
    offset = tl.arange(0, WIDTH)[:, None] * WIDTH + column[None, :]
    start_of = moments.second + at * WIDTH * WIDTH
    second = second.to(moments.second.dtype.element_ty)
    tl.store(start_of + offset, second, mask=is_stored[None, :])
    tl.store(moments.sums + at * WIDTH + column, mean, mask=is_stored)
    is_first = is_owner & (first + tl.arange(0, 1) == 0)
    tl.store(moments.counts + at + tl.arange(0, 1), number, mask=is_first)


@triton.jit
def moments_after(
    second, mean, number, keys, moments, head, heads, index, tokens, first, s, d,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The moments after a chunk, from those before it.

    `keys` (C, d) are the chunk's k̄, or its k, with inverse lengths `moments.scale`.
    """
    start = index * CHUNK
    at = head * tokens + start + tl.arange(0, CHUNK)
    start_of = moments.keys + (head // heads * s * heads + head % heads) * d
    columns = load_tokens(start_of, start, first, s, d, heads * d, 1, CHUNK, BLOCK).to(tl.float32)
    counts = counted(moments.valid, head, heads, start, s, CHUNK)
    if moments.total is not None:
        writes = tl.load(moments.writing + at)
        columns *= writes[:, None]
        counts *= writes
        decay = tl.load(moments.total + head * (tokens // CHUNK) + index)
        second *= decay
        mean *= decay
        number *= decay
    mean += tl.sum(columns, axis=0)
    number += tl.sum(counts, axis=0)
    if moments.scale is not None:
        columns *= tl.load(moments.scale + at)[:, None]
    if keys.dtype != tl.float32:
        columns = columns.to(moments.second.dtype.element_ty)
    second += product(tl.trans(keys), columns, PRECISION)
    return second, mean, number


@triton.jit
def carry_moments(
    k, moments, sizes,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the moments before every chunk; k (b, s, m, d) is k̄."""
    heads, s, tokens, d = sizes.heads, sizes.s, sizes.tokens, sizes.d
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK
    start_of = head_of(k, head, heads)
    second = tl.zeros((WIDTH, BLOCK), tl.float32)
    mean = tl.zeros((BLOCK,), tl.float32)
    number = tl.zeros((1,), tl.float32)
    for index in range(tokens // CHUNK):
        at = head * (tokens // CHUNK) + index
        store_moments(moments, at, first, True, second, mean, number, WIDTH)
        keys = load_head(k, start_of, index * CHUNK, 0, s, d, CHUNK, WIDTH)
        second, mean, number = moments_after(
            second, mean, number, keys, moments, head, heads, index, tokens, first, s, d,
            CHUNK, BLOCK, PRECISION,
        )  # fmt: skip
