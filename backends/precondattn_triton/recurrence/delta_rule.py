"""The rows U that the delta rule writes in a chunk, from the state S before it: U = Y − W S.

    Y = M (β ∘ V),    W = M (β ∘ reading ∘ E),    M = (I + diag(β) stril(D ∘ E Kᵀ))⁻¹

(`inverse_of_chunk`), with E the keys that are erased: K, unless others are given. Backward, with dU
= A + writing ∘ (K dS), where A = s (D ∘ Q Kᵀ)ᵀ dO is the part from outputs of the same chunk,

    X = Mᵀ dU = Mᵀ A + Z dS,    Z = Mᵀ (writing ∘ K),
    dV = β ∘ X,    dS ← total ∘ dS + s Qᵀ (reading ∘ dO) − Eᵀ (β ∘ reading ∘ X)

(`chunk_states.py`). Neither M nor dU is needed by any other kernel, so that M stays in registers.
Of these, the gradients of the other inputs follow (`input_gradient.py`):

    dβ = Σ X ∘ (V − L U) − the state's part,
    dL = −stril((β ∘ X) Uᵀ),    L = stril(D ∘ E Kᵀ),
    dE = (dL ∘ D) K + …,    dK = (dL ∘ D)ᵀ E + …,

and the sum of both where E is K. Keys that are erased from the state before its decay have the
factor reading_{i−1} in W, and D_{i−1,j} in L. With a gate per key channel, D is inside the
products: L is then computed, and its gradient applied, by `channel_decay.py`.

Grid: one program per chunk of one head. It iterates over blocks of channels. FLOPs per token: 3 C d
/ 2 for the scores, about C² for the inverse in float32, and 2 C (d + e) forward; the gradient
computes that again, and 4 C d + 4 C e more. Y, W, Z and Mᵀ A are factors of products only. In
bfloat16 they are stored in it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.recurrence.chunk_tiles import (
    as_factor,
    head_of,
    load_head,
    load_queries,
    pairs_from,
    product,
    store_rows,
    store_tokens,
)
from precondattn_triton.recurrence.decay_factors import factors_of, gates_of, numbers_of
from precondattn_triton.tiles import load_rows
from precondattn_triton.triangular_inverse import unit_lower_inverse


@triton.jit
def inverse_of_chunk(
    k, erase, g, beta, erase_scores, head, heads, tokens, start, s, d,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr,
    UNDECAYED: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """M (CHUNK, CHUNK) of the chunk that begins at `start`; half a chunk has 2^LEVELS tokens.

    `erase` is None for K. With a gate per key channel, `erase_scores` (m, T, CHUNK) is D ∘ E Kᵀ,
    and `g` is None. The two halves are inverted (`triangular_inverse.py`), then the lower left
    corner, −B⁻¹ C A⁻¹. The inversion has float32 precision for every input dtype: entries have
    magnitude about 1, for keys of length 1 and β in [0, 2]. For halves of h tokens, D of a pair
    across their border is e^{g_{j+1} + … + g_h} e^{g_{h+1} + … + g_i}.
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
        k_start = head_of(k, head, heads)
        if erase is not None:
            erase_start = head_of(erase, head, heads)
        for c in range(0, WIDTH, BLOCK):
            first = load_head(k, k_start, start, c, s, d, HALF, BLOCK)
            second = load_head(k, k_start, start + HALF, c, s, d, HALF, BLOCK)
            if erase is not None:
                erased = load_head(erase, erase_start, start, c, s, d, HALF, BLOCK)
                upper += product(erased, tl.trans(first), PRECISION)
                erased = load_head(erase, erase_start, start + HALF, c, s, d, HALF, BLOCK)
                lower += product(erased, tl.trans(second), PRECISION)
                corner += product(erased, tl.trans(first), PRECISION)
            else:
                upper += product(first, tl.trans(first), PRECISION)
                lower += product(second, tl.trans(second), PRECISION)
                corner += product(second, tl.trans(first), PRECISION)
    row = tl.arange(0, HALF)
    token = (start + row).to(tl.int64)
    of_upper = numbers_of(beta, head, heads, token, token < s)
    of_lower = numbers_of(beta, head, heads, token + HALF, token + HALF < s)
    own_upper, own_lower = None, None
    if g is not None:
        # The gates that decay the state until a token erases from it.
        back = 1 if UNDECAYED else 0
        last = token - back
        own_upper = gates_of(g, head, heads, last, (row >= back) & (last < s))
        own_lower = gates_of(g, head, heads, last + HALF, (row >= back) & (last + HALF < s))
    upper *= pairs_from(own_upper, HALF, True, UNDECAYED) * of_upper[:, None]
    upper = unit_lower_inverse(upper, HALF, LEVELS, EXACT)
    lower *= pairs_from(own_lower, HALF, True, UNDECAYED) * of_lower[:, None]
    lower = unit_lower_inverse(lower, HALF, LEVELS, EXACT)
    corner *= of_lower[:, None]
    if g is not None:
        following = gates_of(g, head, heads, token + 1, (row + 1 < HALF) & (token + 1 < s))
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


@triton.jit
def prepare(
    q, k, v, erase, d_o, g, beta, erase_scores, scores, decayed_k, gates, reading, erasing, writing,
    total, strength, y, w, z, local, eraser, sizes,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
    LEVELS: tl.constexpr, DECAY: tl.constexpr, UNDECAYED: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Write Y to `y` (m, T, STEP), W to `w` (m, T, WIDTH) and β to `strength` (m, T).

    With one gate per head, g (m, s), its factors are written as by `load_factors`, and `erasing`
    (m, T) gets reading_{i−1} if it is not None. With a gate per key channel, `reading` (m, T,
    WIDTH) and `erase_scores` (m, T, CHUNK), which is D ∘ E Kᵀ, are read.

    For the gradient, Z is written to `z` (m, T, WIDTH) and Mᵀ A to `local` (m, T, STEP), summed
    over the queries of a state. With a gate per key channel, `scores` (m r, T, CHUNK) is s D ∘ Q
    Kᵀ, `decayed_k` (m, T, WIDTH) is writing ∘ K, and `eraser` (m, T, WIDTH) gets β ∘ reading ∘ E.
    """
    heads, queries, s, t = sizes.heads, sizes.queries, sizes.s, sizes.t
    tokens, d, e, scale = sizes.tokens, sizes.d, sizes.e, sizes.scale
    head = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0) * CHUNK
    position = tl.arange(0, CHUNK)
    token = (start + position).to(tl.int64)
    at = head * tokens + token
    k_start = head_of(k, head, heads)
    v_start = head_of(v, head, heads)
    if erase is not None:
        erase_start = head_of(erase, head, heads)
    inverse = inverse_of_chunk(
        k, erase, g, beta, erase_scores, head, heads, tokens, start, s, d,
        CHUNK, BLOCK, WIDTH, LEVELS, UNDECAYED, PRECISION, EXACT,
    )  # fmt: skip
    strengths = numbers_of(beta, head, heads, token, token < s)
    tl.store(strength + at, strengths)
    erases, writes = strengths, strengths
    if DECAY == "head":
        chunk = head * tl.num_programs(0) + tl.program_id(0)
        until_erased, writes = factors_of(
            g, head, heads, gates, reading, erasing, writing, total, at, chunk, start, s, CHUNK
        )
        erases = strengths * until_erased
    weights = as_factor(inverse * strengths[None, :], y)
    for c in range(0, STEP, BLOCK):
        values = load_head(v, v_start, start, c, s, e, CHUNK, BLOCK)
        store_rows(y, head, tokens, start, c, product(weights, values, PRECISION), STEP)
    weights = as_factor(inverse * erases[None, :], w)
    for c in range(0, WIDTH, BLOCK):
        if erase is not None:
            keys = load_head(erase, erase_start, start, c, s, d, CHUNK, BLOCK)
        else:
            keys = load_head(k, k_start, start, c, s, d, CHUNK, BLOCK)
        if DECAY == "keys":
            keys = keys * load_rows(reading, head, tokens, start, CHUNK, BLOCK, c, WIDTH)
            if eraser is not None:
                rows = keys * strengths[:, None]
                store_rows(eraser, head, tokens, start, c, rows, WIDTH)
            keys = as_factor(keys, w)
        store_rows(w, head, tokens, start, c, product(weights, keys, PRECISION), WIDTH)
    if z is not None:
        weights = inverse
        if DECAY == "head":
            weights = inverse * writes[:, None]
        weights = tl.trans(as_factor(weights, z))
        for c in range(0, WIDTH, BLOCK):
            if DECAY == "keys":
                keys = load_rows(decayed_k, head, tokens, start, CHUNK, BLOCK, c, WIDTH)
            else:
                keys = load_head(k, k_start, start, c, s, d, CHUNK, BLOCK)
            store_rows(z, head, tokens, start, c, product(weights, keys, PRECISION), WIDTH)
        q_start = head_of(q, head, heads)
        d_o_start = head_of(d_o, head, heads)
        weights = tl.trans(as_factor(inverse, local))
        for c in range(0, STEP, BLOCK):
            gradient = tl.zeros((CHUNK, BLOCK), tl.float32)
            for row in range(queries):
                if DECAY == "keys":
                    query = head * queries + row
                    pairs = load_rows(scores, query, tokens, start, CHUNK, CHUNK, 0, CHUNK)
                else:
                    pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
                    for first in range(0, WIDTH, BLOCK):
                        rows = load_queries(
                            q, q_start, row, start - s + t, first, t, d, CHUNK, BLOCK
                        )
                        keys = load_head(k, k_start, start, first, s, d, CHUNK, BLOCK)
                        pairs += product(rows, tl.trans(keys), PRECISION)
                    token_gates = None
                    if g is not None:
                        token_gates = gates_of(g, head, heads, token, token < s)
                    pairs *= pairs_from(token_gates, CHUNK, False) * scale
                cotangent = load_queries(d_o, d_o_start, row, start - s + t, c, t, e, CHUNK, BLOCK)
                gradient += product(tl.trans(as_factor(pairs, local)), cotangent, PRECISION)
            gradient = product(weights, as_factor(gradient, local), PRECISION)
            store_rows(local, head, tokens, start, c, gradient, STEP)


@triton.jit
def d_written(
    v, strength, erase_scores, u, right, d_v, d_keys, d_strength, sizes,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient of v to `d_v` (b, s, m, e), and dL, of keys with a gate per channel.

    `right` (m, T, STEP) is X, and `erase_scores` (m, T, CHUNK) is D ∘ E Kᵀ. `d_keys` (m, T, CHUNK)
    gets dL, and `d_strength` (m, T) the part of β's gradient within the chunk.
    """
    heads, s, tokens, e = sizes.heads, sizes.s, sizes.tokens, sizes.e
    head = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0) * CHUNK
    v_start = head_of(v, head, heads)
    d_v += (head // heads * s * heads + head % heads) * e
    at = head * tokens + start + tl.arange(0, CHUNK)
    beta = tl.load(strength + at)
    within_chunk = tl.zeros((CHUNK, CHUNK), tl.float32)
    d_beta = tl.zeros((CHUNK,), tl.float32)
    for c in range(0, STEP, BLOCK):
        rows = load_rows(right, head, tokens, start, CHUNK, BLOCK, c, STEP)
        written = load_rows(u, head, tokens, start, CHUNK, BLOCK, c, STEP)
        within_chunk += product(rows, tl.trans(written), PRECISION)
        rows = rows.to(tl.float32)
        store_tokens(d_v, start, c, s, e, heads * e, rows * beta[:, None])
        values = load_head(v, v_start, start, c, s, e, CHUNK, BLOCK)
        d_beta += tl.sum(rows * values.to(tl.float32), axis=1)
    within_chunk *= pairs_from(None, CHUNK, True)
    store_rows(d_keys, head, tokens, start, 0, -beta[:, None] * within_chunk, CHUNK)
    scores = load_rows(erase_scores, head, tokens, start, CHUNK, CHUNK, 0, CHUNK).to(tl.float32)
    tl.store(d_strength + at, d_beta - tl.sum(scores * within_chunk, axis=1))
