"""Lengths of queries and keys, and keys of length 1.

    n = √(‖x‖² + ε),    x̄ = x / n

A row is brought to a size of about 1 before it is squared, so that no square overflows or vanishes.
Queries stay where they are, and are divided by their lengths where they are used; keys of length 1
stand in memory, for whoever reads them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.recurrence.chunk_tiles import head_of, store_tokens
from precondattn_triton.tiles import load_tokens

SHORTEST = tl.constexpr(1e-37)
"""A length of which float32 still has the inverse."""


@triton.jit
def inverse_lengths(
    x,
    inverse,
    unit,
    heads,
    queries,
    tokens,
    count,
    missing,
    width,
    least,
    x_b,
    x_m,
    x_t,
    x_r,
    x_c,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """`inverse` (m r, T) gets 1 / n and `unit` (b, count, m, w), if there is one, x̄; r = 1 there.

    x (b, m, count, r, w) has the last tokens; `missing` are in front of them. `least` is √ε. A row
    of zeros has n = √ε, or 1.
    """
    query = tl.program_id(1).to(tl.int64)
    head, row = query // queries, query % queries
    start = tl.program_id(0) * CHUNK
    x = head_of(x, head, heads, x_b, x_m, 1) + row * x_r
    own = load_tokens(x, start - missing, 0, count, width, x_t, x_c, CHUNK, WIDTH).to(tl.float32)
    size = tl.maximum(tl.max(tl.abs(own), axis=1), least)
    size = tl.where(size > 0, size, 1.0)
    scaled = own / size[:, None]
    square = tl.sum(scaled * scaled, axis=1) + (least / size) * (least / size)
    root = tl.sqrt(tl.where(square > 0, square, 1.0))
    place = query * tokens + start + tl.arange(0, CHUNK)
    tl.store(inverse + place, 1.0 / tl.maximum(size * root, SHORTEST))
    if unit is not None:
        unit += (head // heads * count * heads + head % heads) * width
        store_tokens(unit, start, 0, count, width, heads * width, scaled / root[:, None])
