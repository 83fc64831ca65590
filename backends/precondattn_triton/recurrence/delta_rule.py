"""The rows U that the delta rule writes in a chunk, from the state S before it: U = Y − W S.

    Y = M (β ∘ V),    W = M (β ∘ reading ∘ E),    M = (I + diag(β) stril(D ∘ E Kᵀ))⁻¹

(`chunk_inverse.py`), with E the keys that are erased: K, unless others are given. Backward, with
X = Mᵀ dU,

    dV = β ∘ X,    dβ = Σ X ∘ (V − L U) − the state's part (`chunk_gradient.py`),
    dL = −stril((β ∘ X) Uᵀ),    L = stril(D ∘ E Kᵀ),
    dE = (dL ∘ D) K + …,    dK = (dL ∘ D)ᵀ E + …,

and the sum of both where E is K. Keys that are erased from the state before its decay have the
factor reading_{i−1} in W, and D_{i−1,j} in L. With a gate per key channel, D is inside the
products: L is then computed, and its gradient applied, by `channel_decay.py`.

Grid: one program per chunk of one head. It iterates over blocks of channels: 2 C (d + e) FLOPs per
token forward, and 4 C e + 2 C d backward.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.recurrence.chunk_tiles import (
    crossing,
    head_of,
    pairs_of,
    product,
    store_rows,
    store_tokens,
)
from precondattn_triton.tiles import load_rows, load_tokens


@triton.jit
def prepare(
    k,
    v,
    erase,
    strength,
    reading,
    inverse,
    y,
    w,
    heads,
    s,
    tokens,
    d,
    e,
    k_b,
    k_m,
    k_s,
    k_d,
    k_group,
    v_b,
    v_m,
    v_s,
    v_e,
    v_group,
    erase_b,
    erase_m,
    erase_s,
    erase_d,
    erase_group,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    DECAY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write Y to `y` (m, T, STEP) and W to `w` (m, T, WIDTH)."""
    head = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0) * CHUNK
    if erase is not None:
        k = head_of(erase, head, heads, erase_b, erase_m, erase_group)
        k_s, k_d = erase_s, erase_d
    else:
        k = head_of(k, head, heads, k_b, k_m, k_group)
    v = head_of(v, head, heads, v_b, v_m, v_group)
    at = head * tokens + start + tl.arange(0, CHUNK)
    weights = load_rows(inverse, head, tokens, start, CHUNK, CHUNK, 0, CHUNK)
    weights *= tl.load(strength + at)[None, :]
    for c in range(0, STEP, BLOCK):
        values = load_tokens(v, start, c, s, e, v_s, v_e, CHUNK, BLOCK)
        store_rows(y, head, tokens, start, c, product(weights, values, PRECISION), STEP)
    if DECAY == "head":
        weights *= tl.load(reading + at)[None, :]
    for c in range(0, WIDTH, BLOCK):
        keys = load_tokens(k, start, c, s, d, k_s, k_d, CHUNK, BLOCK)
        if DECAY == "keys":
            keys = keys * load_rows(reading, head, tokens, start, CHUNK, BLOCK, c, WIDTH)
        store_rows(w, head, tokens, start, c, product(weights, keys, PRECISION), WIDTH)


@triton.jit
def d_written(
    k,
    v,
    erase,
    gates,
    strength,
    among,
    inverse,
    u,
    d_u,
    d_right,
    d_v,
    d_keys,
    d_strength,
    crossing_keys,
    heads,
    s,
    tokens,
    d,
    e,
    k_b,
    k_m,
    k_s,
    k_d,
    k_group,
    v_b,
    v_m,
    v_s,
    v_e,
    v_group,
    erase_b,
    erase_m,
    erase_s,
    erase_d,
    erase_group,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    UNDECAYED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write X to `d_right` (m, T, STEP) and the gradient of v to `d_v` (b, s, m, e).

    `d_keys` (m, T, CHUNK) gets dL ∘ D, and where E is K the sum with its transpose, the factor of K
    in dK. `d_strength` and `crossing_keys` (m, T) get the part within the chunk of the gradients of
    β and of the gates. With a gate per key channel, `among` (m, T, CHUNK) is D ∘ E Kᵀ, `gates` is
    None, and `d_keys` gets dL.
    """
    head = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0) * CHUNK
    k = head_of(k, head, heads, k_b, k_m, k_group)
    v = head_of(v, head, heads, v_b, v_m, v_group)
    d_v += (head // heads * s * heads + head % heads) * e
    at = head * tokens + start
    row = tl.arange(0, CHUNK)
    beta = tl.load(strength + at + row)
    within_chunk = tl.zeros((CHUNK, CHUNK), tl.float32)
    d_beta = tl.zeros((CHUNK,), tl.float32)
    for c in range(0, STEP, BLOCK):
        weights = load_rows(inverse, head, tokens, start, CHUNK, CHUNK, 0, CHUNK)
        d_written_rows = load_rows(d_u, head, tokens, start, CHUNK, BLOCK, c, STEP)
        right = product(tl.trans(weights), d_written_rows, PRECISION)
        store_rows(d_right, head, tokens, start, c, right, STEP)
        store_tokens(d_v, start, c, s, e, heads * e, right * beta[:, None])
        written = load_rows(u, head, tokens, start, CHUNK, BLOCK, c, STEP)
        within_chunk += product(right, tl.trans(written), PRECISION)
        values = load_tokens(v, start, c, s, e, v_s, v_e, CHUNK, BLOCK)
        d_beta += tl.sum(right * values.to(tl.float32), axis=1)
    if among is not None:
        scores = load_rows(among, head, tokens, start, CHUNK, CHUNK, 0, CHUNK)
    else:
        if erase is not None:
            erase = head_of(erase, head, heads, erase_b, erase_m, erase_group)
        scores = tl.zeros((CHUNK, CHUNK), tl.float32)
        for c in range(0, WIDTH, BLOCK):
            keys = load_tokens(k, start, c, s, d, k_s, k_d, CHUNK, BLOCK)
            if erase is not None:
                erased = load_tokens(erase, start, c, s, d, erase_s, erase_d, CHUNK, BLOCK)
                scores += product(erased, tl.trans(keys), PRECISION)
            else:
                scores += product(keys, tl.trans(keys), PRECISION)
    within_chunk *= pairs_of(gates, at, CHUNK, True, UNDECAYED)
    d_pairs = -beta[:, None] * within_chunk
    if among is None and erase is None:
        store_rows(d_keys, head, tokens, start, 0, d_pairs + tl.trans(d_pairs), CHUNK)
    else:
        store_rows(d_keys, head, tokens, start, 0, d_pairs, CHUNK)
    scores *= within_chunk
    tl.store(d_strength + at + row, d_beta - tl.sum(scores, axis=1))
    if gates is not None:
        d_gates = crossing(-beta[:, None] * scores, CHUNK, UNDECAYED)
        tl.store(crossing_keys + at + row, d_gates)
