"""The inverse of the delta rule's system within a chunk, in registers.

    M = (I + L)⁻¹,    L = diag(β) stril(D ∘ E Kᵀ)

with E the keys that are erased: K, unless others are given. With a gate per key channel, D is
inside the product, and the scores of E and K are those of `channel_decay.py`. Keys that are erased
from the state before its decay have D_ij without the gate of token i.

The two halves of the chunk are inverted (`triangular_inverse.py`), then the lower left corner: [[A,
0], [C, B]]⁻¹ has −B⁻¹ C A⁻¹ there. The inversion has float32 precision for every input dtype:
entries have magnitude about 1, for keys of length 1 and β in [0, 2]. For halves of h tokens, D of a
pair across their border is

    D_ij = e^{g_{j+1} + … + g_h} e^{g_{h+1} + … + g_i}.

2 C² d FLOPs per chunk, and about C³ for the inverse.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.recurrence.chunk_tiles import load_head, pairs_from, product
from precondattn_triton.recurrence.gate_sums import gates_of
from precondattn_triton.tiles import load_rows
from precondattn_triton.triangular_inverse import unit_lower_inverse


@triton.jit
def inverse_of_chunk(
    k,
    erase,
    g,
    beta,
    erase_scores,
    head,
    tokens,
    start,
    s,
    d,
    k_strides,
    erase_strides,
    g_strides,
    beta_strides,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    LEVELS: tl.constexpr,
    UNDECAYED: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):
    """M (CHUNK, CHUNK) of the chunk that begins at `start`; half a chunk has 2^LEVELS tokens.

    `k`, `erase`, `g` and `beta` are those of one head, and `erase` is None for K. With a gate per
    key channel, `erase_scores` (m, T, CHUNK) is D ∘ E Kᵀ, and `g` is None.
    """
    HALF: tl.constexpr = CHUNK // 2
    if erase_scores is not None:
        middle = start + HALF
        upper = load_rows(erase_scores, head, tokens, start, HALF, HALF, 0, CHUNK).to(tl.float32)
        lower = load_rows(erase_scores, head, tokens, middle, HALF, HALF, HALF, CHUNK)
        corner = load_rows(erase_scores, head, tokens, middle, HALF, HALF, 0, CHUNK)
        lower, corner = lower.to(tl.float32), corner.to(tl.float32)
    else:
        upper = tl.zeros((HALF, HALF), tl.float32)
        lower = tl.zeros((HALF, HALF), tl.float32)
        corner = tl.zeros((HALF, HALF), tl.float32)
        for c in range(0, WIDTH, BLOCK):
            first = load_head(k, start, c, s, d, k_strides, HALF, BLOCK)
            second = load_head(k, start + HALF, c, s, d, k_strides, HALF, BLOCK)
            if erase is not None:
                erased = load_head(erase, start, c, s, d, erase_strides, HALF, BLOCK)
                upper += product(erased, tl.trans(first), PRECISION)
                erased = load_head(erase, start + HALF, c, s, d, erase_strides, HALF, BLOCK)
                lower += product(erased, tl.trans(second), PRECISION)
                corner += product(erased, tl.trans(first), PRECISION)
            else:
                upper += product(first, tl.trans(first), PRECISION)
                lower += product(second, tl.trans(second), PRECISION)
                corner += product(second, tl.trans(first), PRECISION)
    row = tl.arange(0, HALF)
    token = (start + row).to(tl.int64)
    of_upper = tl.load(beta + token * beta_strides.token, mask=token < s, other=0.0).to(tl.float32)
    of_lower = tl.load(beta + (token + HALF) * beta_strides.token, mask=token + HALF < s, other=0.0)
    of_lower = of_lower.to(tl.float32)
    own_upper, own_lower = None, None
    if g is not None:
        # The gates that decay the state until a token erases from it.
        back = 1 if UNDECAYED else 0
        last = token - back
        own_upper = gates_of(g, last, g_strides.token, (row >= back) & (last < s))
        own_lower = gates_of(g, last + HALF, g_strides.token, (row >= back) & (last + HALF < s))
    upper *= pairs_from(own_upper, HALF, True, UNDECAYED) * of_upper[:, None]
    upper = unit_lower_inverse(upper, HALF, LEVELS, EXACT)
    lower *= pairs_from(own_lower, HALF, True, UNDECAYED) * of_lower[:, None]
    lower = unit_lower_inverse(lower, HALF, LEVELS, EXACT)
    corner *= of_lower[:, None]
    if g is not None:
        following = gates_of(g, token + 1, g_strides.token, (row + 1 < HALF) & (token + 1 < s))
        until = tl.cumsum(following, axis=0, reverse=True)
        corner *= tl.exp(tl.cumsum(own_lower, axis=0))[:, None] * tl.exp(until)[None, :]
    corner = tl.dot(lower, corner, input_precision=EXACT)
    corner = -tl.dot(corner, upper, input_precision=EXACT)
    above = beside(upper, tl.zeros_like(upper), HALF, HALF)
    below = beside(corner, lower, HALF, HALF)
    both = tl.permute(tl.join(above, below), (2, 0, 1))
    return tl.reshape(both, (CHUNK, CHUNK))


@triton.jit
def beside(left, right, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Two tiles (ROWS, COLUMNS) as one of twice as many columns."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (ROWS, 2 * COLUMNS))
