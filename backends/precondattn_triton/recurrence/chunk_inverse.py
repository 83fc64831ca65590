"""The inverse of the delta rule's system within a chunk.

    M = (I + L)⁻¹,    L = diag(β) stril(D ∘ E Kᵀ)

with E the keys that are erased: K, unless others are given. With a gate per key channel, D is
inside the product, and the scores of E and K are those of `channel_decay.py`. Keys that are erased
from the state before its decay have D_ij without the gate of token i.

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
from precondattn_triton.tiles import load_rows, load_tokens
from precondattn_triton.triangular_inverse import unit_lower_inverse


@triton.jit
def invert(
    k,
    erase,
    gates,
    strength,
    among,
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
    erase_b,
    erase_m,
    erase_s,
    erase_d,
    erase_group,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    LEVELS: tl.constexpr,
    UNDECAYED: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Write M to `inverse` (m, T, CHUNK); half a chunk has 2^LEVELS tokens.

    `erase` is E, or None for K. With a gate per key channel, `among` (m, T, CHUNK) is D ∘ E Kᵀ, and
    `gates` is None.
    """
    HALF: tl.constexpr = CHUNK // 2
    head = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0) * CHUNK
    if among is not None:
        upper = load_rows(among, head, tokens, start, HALF, HALF, 0, CHUNK)
        lower = load_rows(among, head, tokens, start + HALF, HALF, HALF, HALF, CHUNK)
        corner = load_rows(among, head, tokens, start + HALF, HALF, HALF, 0, CHUNK)
    else:
        k = head_of(k, head, heads, k_b, k_m, k_group)
        if erase is not None:
            erase = head_of(erase, head, heads, erase_b, erase_m, erase_group)
        upper = tl.zeros((HALF, HALF), tl.float32)
        lower = tl.zeros((HALF, HALF), tl.float32)
        corner = tl.zeros((HALF, HALF), tl.float32)
        for c in range(0, WIDTH, BLOCK):
            first = load_tokens(k, start, c, s, d, k_s, k_d, HALF, BLOCK)
            second = load_tokens(k, start + HALF, c, s, d, k_s, k_d, HALF, BLOCK)
            if erase is not None:
                erased = load_tokens(erase, start, c, s, d, erase_s, erase_d, HALF, BLOCK)
                upper += product(erased, tl.trans(first), PRECISION)
                erased = load_tokens(erase, start + HALF, c, s, d, erase_s, erase_d, HALF, BLOCK)
                lower += product(erased, tl.trans(second), PRECISION)
                corner += product(erased, tl.trans(first), PRECISION)
            else:
                upper += product(first, tl.trans(first), PRECISION)
                lower += product(second, tl.trans(second), PRECISION)
                corner += product(second, tl.trans(first), PRECISION)
    row = tl.arange(0, HALF)
    at = head * tokens + start
    beta = tl.load(strength + at + row)
    upper *= pairs_of(gates, at, HALF, True, UNDECAYED) * beta[:, None]
    upper = unit_lower_inverse(upper, HALF, LEVELS, EXACT)
    beta = tl.load(strength + at + HALF + row)
    lower *= pairs_of(gates, at + HALF, HALF, True, UNDECAYED) * beta[:, None]
    lower = unit_lower_inverse(lower, HALF, LEVELS, EXACT)
    corner *= beta[:, None]
    if gates is not None:
        if UNDECAYED:
            own = tl.load(gates + at + HALF + row - 1, mask=row > 0, other=0.0)
        else:
            own = tl.load(gates + at + HALF + row)
        since = tl.cumsum(own, axis=0)
        following = tl.load(gates + at + 1 + row, mask=row + 1 < HALF, other=0.0)
        until = tl.cumsum(following, axis=0, reverse=True)
        corner *= tl.exp(since)[:, None] * tl.exp(until)[None, :]
    corner = tl.dot(lower, corner, input_precision=EXACT)
    corner = -tl.dot(corner, upper, input_precision=EXACT)
    store_rows(inverse, head, tokens, start, 0, upper, CHUNK)
    store_rows(inverse, head, tokens, start, HALF, tl.zeros_like(upper), CHUNK)
    store_rows(inverse, head, tokens, start + HALF, 0, corner, CHUNK)
    store_rows(inverse, head, tokens, start + HALF, HALF, lower, CHUNK)
