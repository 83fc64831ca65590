"""The inverse of the delta rule's system within a chunk.

    M = (I + L)⁻¹,    L = diag(β) stril(D ∘ K Kᵀ)

The two halves of the chunk are inverted in registers (`triangular_inverse.py`), then the lower left
corner: [[A, 0], [C, B]]⁻¹ has −B⁻¹ C A⁻¹ there. The inversion has float32 precision for every
input dtype: entries have magnitude about 1, for keys of length 1 and β in [0, 2]. For halves of h
tokens, D of a pair across their border is

    D_ij = e^{g_{j+1} + … + g_h} e^{g_{h+1} + … + g_i}.

Grid: one program per chunk of one head: 2 C² d FLOPs, and about C³ for the inverse.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.recurrence.chunk_tiles import head_of, pairs_of, product, store_rows
from precondattn_triton.tiles import load_tokens
from precondattn_triton.triangular_inverse import unit_lower_inverse


@triton.jit
def invert(
    k,
    gates,
    strength,
    inverse,
    heads,
    s,
    tokens,
    d,
    k_b,
    k_m,
    k_s,
    k_d,
    k_group,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Write M to `inverse` (m, T, CHUNK); half a chunk has 2^LEVELS tokens."""
    HALF: tl.constexpr = CHUNK // 2
    head = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0) * CHUNK
    k = head_of(k, head, heads, k_b, k_m, k_group)
    upper = tl.zeros((HALF, HALF), tl.float32)
    lower = tl.zeros((HALF, HALF), tl.float32)
    corner = tl.zeros((HALF, HALF), tl.float32)
    for c in range(0, WIDTH, BLOCK):
        first = load_tokens(k, start, c, s, d, k_s, k_d, HALF, BLOCK)
        second = load_tokens(k, start + HALF, c, s, d, k_s, k_d, HALF, BLOCK)
        upper += product(first, tl.trans(first), PRECISION)
        lower += product(second, tl.trans(second), PRECISION)
        corner += product(second, tl.trans(first), PRECISION)
    row = tl.arange(0, HALF)
    at = head * tokens + start
    beta = tl.load(strength + at + row)
    upper *= pairs_of(gates, at, HALF, True) * beta[:, None]
    upper = unit_lower_inverse(upper, HALF, LEVELS, EXACT)
    beta = tl.load(strength + at + HALF + row)
    lower *= pairs_of(gates, at + HALF, HALF, True) * beta[:, None]
    lower = unit_lower_inverse(lower, HALF, LEVELS, EXACT)
    corner *= beta[:, None]
    if gates is not None:
        since = tl.cumsum(tl.load(gates + at + HALF + row), axis=0)
        following = tl.load(gates + at + 1 + row, mask=row + 1 < HALF, other=0.0)
        until = tl.cumsum(following, axis=0, reverse=True)
        corner *= tl.exp(since)[:, None] * tl.exp(until)[None, :]
    corner = tl.dot(lower, corner, input_precision=EXACT)
    corner = -tl.dot(corner, upper, input_precision=EXACT)
    store_rows(inverse, head, tokens, start, 0, upper, CHUNK)
    store_rows(inverse, head, tokens, start, HALF, tl.zeros_like(upper), CHUNK)
    store_rows(inverse, head, tokens, start + HALF, 0, corner, CHUNK)
    store_rows(inverse, head, tokens, start + HALF, HALF, lower, CHUNK)
