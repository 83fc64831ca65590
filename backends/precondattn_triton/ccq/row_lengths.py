"""Lengths of queries and keys, and keys of length 1.

    n = √(‖x‖² + ε),    x̄ = x / n

A row is divided by its largest magnitude, or by √ε if that is larger, before it is squared, so that
no square overflows or underflows. Queries are not copied; they are divided by their lengths when
they are used. Keys of length 1 are stored, since several kernels read them. Grid: one program per
chunk of one head or query head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.recurrence.chunk_tiles import head_of, store_tokens
from precondattn_triton.tiles import load_tokens

SHORTEST = tl.constexpr(1e-37)
"""A length whose inverse is finite in float32."""


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
    """Write 1 / n to `inverse` (m r, T), and x̄ to `unit` (b, count, m, w) if not None; then r = 1.

    x (b, m, count, r, w) has the last `count` tokens; `missing` tokens precede them. `least` is √ε.
    A row of zeros has n = √ε, or n = 1 if ε = 0.
    """
    query = tl.program_id(1).to(tl.int64)
    head, row = query // queries, query % queries
    start = tl.program_id(0) * CHUNK
    x = head_of(x, head, heads, x_b, x_m, 1) + row * x_r
    rows = load_tokens(x, start - missing, 0, count, width, x_t, x_c, CHUNK, WIDTH).to(tl.float32)
    size = tl.maximum(tl.max(tl.abs(rows), axis=1), least)
    size = tl.where(size > 0, size, 1.0)
    scaled = rows / size[:, None]
    square = tl.sum(scaled * scaled, axis=1) + (least / size) * (least / size)
    root = tl.sqrt(tl.where(square > 0, square, 1.0))
    at = query * tokens + start + tl.arange(0, CHUNK)
    tl.store(inverse + at, 1.0 / tl.maximum(size * root, SHORTEST))
    if unit is not None:
        unit += (head // heads * count * heads + head % heads) * width
        store_tokens(unit, start, 0, count, width, heads * width, scaled / root[:, None])
