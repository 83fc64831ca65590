"""Lengths of queries and keys, and keys of length 1.

    n = √(‖x‖² + ε),    x̄ = x / n

A row is divided by its largest magnitude, or by √ε if that is larger, before it is squared, so that
no square overflows or underflows. Keys of length 1 are stored, since several kernels read them
(`unit_keys`). Queries are not copied: the kernel that reads them adds up their squares, a block of
channels at a time (`with_squares`), and divides by their lengths what it computed from them. Grid
of `unit_keys`: one program per chunk of one head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.recurrence.chunk_tiles import head_of, load_head, store_tokens

SHORTEST = tl.constexpr(1e-37)
"""A length whose inverse is finite in float32."""


@triton.jit
def no_squares(least, ROWS: tl.constexpr):
    """The largest magnitude and the sum of squares of rows of which no channel was read.

    `least` is √ε, a channel that every row has.
    """
    return tl.zeros((ROWS,), tl.float32) + least, tl.full((ROWS,), 1.0, tl.float32)


@triton.jit
def with_squares(size, square, rows):
    """The largest magnitude and the sum of squares of the rows, with these channels of them.

    Squares are relative to the square of the largest magnitude.
    """
    rows = rows.to(tl.float32)
    larger = tl.maximum(size, tl.max(tl.abs(rows), axis=1))
    divisor = tl.where(larger > 0, larger, 1.0)
    scaled = rows / divisor[:, None]
    shrink = size / divisor
    return larger, square * shrink * shrink + tl.sum(scaled * scaled, axis=1)


@triton.jit
def length_of(size, square):
    """n, as a product of two numbers. A row of zeros has n = √ε, or n = 1 if ε = 0."""
    return tl.where(size > 0, size, 1.0), tl.sqrt(tl.where(square > 0, square, 1.0))


@triton.jit
def inverse_length(size, square):
    """1 / n."""
    size, root = length_of(size, square)
    return 1.0 / tl.maximum(size * root, SHORTEST)


@triton.jit
def unit_keys(x, inverse, unit, sizes, least, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """Write 1 / n of the keys x (b, m, s, d) to `inverse` (m, T), and x̄ to `unit` (b, s, m, d)."""
    heads, s, tokens, d = sizes.heads, sizes.s, sizes.tokens, sizes.d
    head = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0) * CHUNK
    x_start = head_of(x, head, heads)
    rows = load_head(x, x_start, start, 0, s, d, CHUNK, WIDTH).to(tl.float32)
    size, square = no_squares(least, CHUNK)
    size, square = with_squares(size, square, rows)
    at = head * tokens + start + tl.arange(0, CHUNK)
    tl.store(inverse + at, inverse_length(size, square))
    size, root = length_of(size, square)
    unit += (head // heads * s * heads + head % heads) * d
    rows = rows / size[:, None] / root[:, None]
    store_tokens(unit, start, 0, s, d, heads * d, rows)
