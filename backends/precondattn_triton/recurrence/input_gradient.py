"""The gradients of all inputs of a chunk in one kernel, for gates of heads, of channels or none.

    dA = s D ∘ dO Uᵀ,    dQ = dA K + s reading ∘ dO Sᵀ,
    dK = dAᵀ Q (summed over the queries of a state) + writing ∘ U dSᵀ
         − reading ∘ β ∘ X Sᵀ + (dL ∘ D + its transpose) K,

the second line of dK with the delta rule only, with X and dL of `delta_rule.py`; S is the state
before the chunk, dS the gradient of the state after it. If other keys E are erased than K, that
line is replaced by (dL ∘ D)ᵀ E, and

    dE = (dL ∘ D) K − reading ∘ β ∘ X Sᵀ.

Additive: U = V, and dV = s (D ∘ Q Kᵀ)ᵀ dO + writing ∘ K dS. With the delta rule, dV = β ∘ X.

With a gate per channel, other kernels have computed dA, dV and dL (`channel_pairs.py`,
`chunk_states.py` and `delta_rule.py`) and, for key channels, the products of dA and dL with rows
(`channel_decay.py`). This kernel then adds the parts from the states, and stores x ∘ dx for the
gradients of the gates (`decay_factors.py`).

The gradient of a gate is a sum over everything that it decays: pairs of tokens (`crossing`), reads
of the state before the chunk (Σ Q ∘ dQ, − Σ E ∘ dE), writes to the state after it (Σ K ∘ dK), and
the state itself from before to after the chunk (Σ S ∘ dS). Of dQ, dK and dE, these are the parts
from the state.

Grid: one program per chunk of one head. A program has three parts: dQ and dA, which is written to
the workspace; the pairs dL of the delta rule with dV, or dV; and dK and dE, which read dA. Between
them, a barrier makes dA complete, and keeps the compiler from holding one part's tiles in registers
during another. The first and the last part iterate over blocks of key channels, and within these
over value channels. FLOPs per token: delta rule 6 d e + 2 C (5 d + 2 e); additive 6 d e + 2 C (4 d
+ 2 e). Memory traffic is that of the inputs and their gradients, X, U and two states per chunk; the
parts read some of them again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.recurrence.chunk_tiles import (
    as_factor,
    crossing,
    head_of,
    load_head,
    load_queries,
    pairs_of,
    product,
    store_rows,
    store_tokens,
)
from precondattn_triton.tiles import load_rows


@triton.jit
def d_inputs(
    q, k, v, erase, d_o, u, right, gates, strength, reading, erasing, writing, total, states,
    d_states, d_scores, within_q, within_k, within_erase, d_strength, d_q, d_k, d_v, d_erase, d_g,
    d_beta, query_products, key_products, erase_products, overlap, sizes,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    STEP: tl.constexpr, DECAY: tl.constexpr, UNDECAYED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write `d_q` (b, t, m, r, d), `d_k` (b, s, m, d), `d_v` (b, s, m, e), `d_g`, `d_beta` (m, s).

    `right` (m, T, STEP) is X. In an additive recurrence it, `u`, `strength` and `d_beta` are None.
    `erase` and `d_erase` (b, s, m, d) are None if E is K, and `gates` and `d_g` without gates.
    `d_scores` (m r, T, CHUNK) gets dA.

    With a gate per channel, `d_scores` is read, `d_v` and `d_g` are not written, and the pairs'
    part of dβ is `d_strength` (m, T). With a gate per key channel, `query_products` (m r, T, WIDTH)
    gets Q ∘ dQ, `key_products` (m, T, WIDTH) K ∘ dK and `erase_products` − E ∘ dE, of the parts
    from the state, and `overlap` (m, chunks, WIDTH) Σ S ∘ dS over value channels; `within_q` (m r,
    T, WIDTH), `within_k` and `within_erase` (m, T, WIDTH) are the parts from within the chunk.
    """
    heads, queries, s, t = sizes.heads, sizes.queries, sizes.s, sizes.t
    tokens, d, e, scale = sizes.tokens, sizes.d, sizes.e, sizes.scale
    head = tl.program_id(1).to(tl.int64)
    chunk = head * tl.num_programs(0) + tl.program_id(0)
    start = tl.program_id(0) * CHUNK
    position = tl.arange(0, CHUNK)
    numbers = head * tokens + start + position
    output = head // heads * s * heads + head % heads
    q_start = head_of(q, head, heads)
    k_start = head_of(k, head, heads)
    v_start = head_of(v, head, heads)
    d_o_start = head_of(d_o, head, heads)
    d_q += (head // heads * t * heads + head % heads) * queries * d
    d_k += output * d
    # The sums of each token: of its pairs' gates, and of its reads, erasures and writes.
    crossed = tl.zeros((CHUNK,), tl.float32)
    reads = tl.zeros((CHUNK,), tl.float32)
    erasures = tl.zeros((CHUNK,), tl.float32)
    writes = tl.zeros((CHUNK,), tl.float32)
    overlaps = tl.zeros((KEYS,), tl.float32)
    for row in range(queries):
        query = head * queries + row
        if DECAY == "none" or DECAY == "head":
            pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
            for c in range(0, e, BLOCK):
                cotangent = load_queries(d_o, d_o_start, row, start - s + t, c, t, e, CHUNK, BLOCK)
                if u is not None:
                    values = load_rows(u, head, tokens, start, CHUNK, BLOCK, c, STEP)
                else:
                    values = load_head(v, v_start, start, c, s, e, CHUNK, BLOCK)
                pairs += product(cotangent, tl.trans(values), PRECISION)
            pairs *= pairs_of(gates, head * tokens + start, CHUNK, False) * scale
            if DECAY == "head":
                scores = tl.zeros((CHUNK, CHUNK), tl.float32)
                for first in range(0, d, KEYS):
                    keys = load_head(k, k_start, start, first, s, d, CHUNK, KEYS)
                    rows = load_queries(q, q_start, row, start - s + t, first, t, d, CHUNK, KEYS)
                    scores += product(rows, tl.trans(keys), PRECISION)
                crossed += crossing(pairs * scores, CHUNK)
            pairs = as_factor(pairs, d_scores)
            store_rows(d_scores, query, tokens, start, 0, pairs, CHUNK)
        elif DECAY == "values":
            pairs = load_rows(d_scores, query, tokens, start, CHUNK, CHUNK, 0, CHUNK)
        # Between the parts of a program, no value is kept that can be loaded again.
        tl.debug_barrier()
        for first in range(0, d, KEYS):
            gradient = tl.zeros((CHUNK, KEYS), tl.float32)
            for c in range(0, e, BLOCK):
                cotangent = load_queries(d_o, d_o_start, row, start - s + t, c, t, e, CHUNK, BLOCK)
                if DECAY == "values":
                    rows = load_rows(reading, head, tokens, start, CHUNK, BLOCK, c, STEP)
                    cotangent = as_factor(cotangent * rows, states)
                state = load_rows(states, chunk, WIDTH, first, KEYS, BLOCK, c, STEP)
                gradient += product(cotangent, tl.trans(state), PRECISION)
            gradient *= scale
            if DECAY == "head" or DECAY == "keys":
                rows = load_queries(q, q_start, row, start - s + t, first, t, d, CHUNK, KEYS)
            if DECAY == "head":
                gradient *= tl.load(reading + numbers)[:, None]
                reads += tl.sum(gradient * rows.to(tl.float32), axis=1)
            if DECAY == "keys":
                gradient *= load_rows(reading, head, tokens, start, CHUNK, KEYS, first, WIDTH)
                rows = gradient * rows.to(tl.float32)
                store_rows(query_products, query, tokens, start, first, rows, WIDTH)
                gradient += load_rows(within_q, query, tokens, start, CHUNK, KEYS, first, WIDTH)
            else:
                keys = load_head(k, k_start, start, first, s, d, CHUNK, KEYS)
                gradient += product(pairs, keys, PRECISION)
            at = start - s + t
            store_tokens(d_q + row * d, at, first, t, d, heads * queries * d, gradient)
    # `d_scores` is complete.
    tl.debug_barrier()
    if right is not None:
        if erase is not None:
            erase_start = head_of(erase, head, heads)
            d_erase += output * d
        beta = tl.load(strength + numbers)
    if DECAY == "none" or DECAY == "head":
        d_v += output * e
        if right is not None:
            d_strengths = tl.zeros((CHUNK,), tl.float32)
            within = tl.zeros((CHUNK, CHUNK), tl.float32)
            for c in range(0, e, BLOCK):
                rows = load_rows(right, head, tokens, start, CHUNK, BLOCK, c, STEP)
                values = load_rows(u, head, tokens, start, CHUNK, BLOCK, c, STEP)
                within += product(rows, tl.trans(values), PRECISION)
                rows = rows.to(tl.float32)
                store_tokens(d_v, start, c, s, e, heads * e, rows * beta[:, None])
                values = load_head(v, v_start, start, c, s, e, CHUNK, BLOCK)
                d_strengths += tl.sum(rows * values.to(tl.float32), axis=1)
            within *= pairs_of(gates, head * tokens + start, CHUNK, True, UNDECAYED)
            scores = tl.zeros((CHUNK, CHUNK), tl.float32)
            for c in range(0, d, BLOCK):
                keys = load_head(k, k_start, start, c, s, d, CHUNK, BLOCK)
                if erase is not None:
                    erased_keys = load_head(erase, erase_start, start, c, s, d, CHUNK, BLOCK)
                    scores += product(erased_keys, tl.trans(keys), PRECISION)
                else:
                    scores += product(keys, tl.trans(keys), PRECISION)
            scores *= within
            d_strengths -= tl.sum(scores, axis=1)
            d_pairs = -beta[:, None] * within
            if erase is None:
                d_pairs += tl.trans(d_pairs)
            d_pairs = as_factor(d_pairs, states)
            if DECAY == "head":
                crossed += crossing(-beta[:, None] * scores, CHUNK, UNDECAYED)
        else:
            for c in range(0, e, BLOCK):
                gradient = tl.zeros((CHUNK, BLOCK), tl.float32)
                for first in range(0, d, KEYS):
                    keys = load_head(k, k_start, start, first, s, d, CHUNK, KEYS)
                    d_state = load_rows(d_states, chunk, WIDTH, first, KEYS, BLOCK, c, STEP)
                    gradient += product(keys, d_state, PRECISION)
                if DECAY == "head":
                    gradient *= tl.load(writing + numbers)[:, None]
                for row in range(queries):
                    pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
                    for first in range(0, d, KEYS):
                        keys = load_head(k, k_start, start, first, s, d, CHUNK, KEYS)
                        rows = load_queries(
                            q, q_start, row, start - s + t, first, t, d, CHUNK, KEYS
                        )
                        pairs += product(rows, tl.trans(keys), PRECISION)
                    pairs *= pairs_of(gates, head * tokens + start, CHUNK, False) * scale
                    cotangent = load_queries(
                        d_o, d_o_start, row, start - s + t, c, t, e, CHUNK, BLOCK
                    )
                    gradient += product(tl.trans(as_factor(pairs, states)), cotangent, PRECISION)
                store_tokens(d_v, start, c, s, e, heads * e, gradient)
    elif right is not None:
        d_strengths = tl.load(d_strength + numbers)
    tl.debug_barrier()
    for first in range(0, d, KEYS):
        keys = load_head(k, k_start, start, first, s, d, CHUNK, KEYS)
        gradient = tl.zeros((CHUNK, KEYS), tl.float32)
        if right is not None:
            from_state = tl.zeros((CHUNK, KEYS), tl.float32)
        if DECAY == "keys":
            overlaps = tl.zeros((KEYS,), tl.float32)
        for c in range(0, e, BLOCK):
            d_state = load_rows(d_states, chunk, WIDTH, first, KEYS, BLOCK, c, STEP)
            if u is not None:
                values = load_rows(u, head, tokens, start, CHUNK, BLOCK, c, STEP)
            else:
                values = load_head(v, v_start, start, c, s, e, CHUNK, BLOCK)
            if DECAY == "values":
                rows = load_rows(writing, head, tokens, start, CHUNK, BLOCK, c, STEP)
                values = as_factor(values * rows, states)
            gradient += product(values, tl.trans(d_state), PRECISION)
            if right is not None or DECAY == "head" or DECAY == "keys":
                state = load_rows(states, chunk, WIDTH, first, KEYS, BLOCK, c, STEP)
            if DECAY == "head" or DECAY == "keys":
                overlaps += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), axis=1)
            if right is not None:
                rows = load_rows(right, head, tokens, start, CHUNK, BLOCK, c, STEP)
                from_state += product(rows, tl.trans(state), PRECISION)
        if DECAY == "head":
            gradient *= tl.load(writing + numbers)[:, None]
            writes += tl.sum(gradient * keys.to(tl.float32), axis=1)
        if DECAY == "keys":
            tl.store(overlap + chunk * WIDTH + first + tl.arange(0, KEYS), overlaps)
            gradient *= load_rows(writing, head, tokens, start, CHUNK, KEYS, first, WIDTH)
            products = gradient * keys.to(tl.float32)
            store_rows(key_products, head, tokens, start, first, products, WIDTH)
            gradient += load_rows(within_k, head, tokens, start, CHUNK, KEYS, first, WIDTH)
        if right is not None:
            if DECAY == "head":
                from_state *= tl.load(erasing + numbers)[:, None]
            if DECAY == "keys":
                from_state *= load_rows(reading, head, tokens, start, CHUNK, KEYS, first, WIDTH)
            erased_keys = keys
            if erase is not None:
                erased_keys = load_head(erase, erase_start, start, first, s, d, CHUNK, KEYS)
            products = from_state * erased_keys.to(tl.float32)
            erasures += tl.sum(products, axis=1)
            if DECAY == "keys":
                products *= beta[:, None]
                store_rows(erase_products, head, tokens, start, first, products, WIDTH)
                of_erased = -beta[:, None] * from_state
                if erase is not None:
                    of_erased += load_rows(
                        within_erase, head, tokens, start, CHUNK, KEYS, first, WIDTH
                    )
            else:
                if erase is not None:
                    gradient += product(tl.trans(d_pairs), erased_keys, PRECISION)
                of_erased = product(d_pairs, keys, PRECISION) - beta[:, None] * from_state
            if erase is not None:
                store_tokens(d_erase, start, first, s, d, heads * d, of_erased)
            else:
                gradient += of_erased
        if DECAY != "keys":
            for row in range(queries):
                at = head * queries + row
                pairs = load_rows(d_scores, at, tokens, start, CHUNK, CHUNK, 0, CHUNK)
                rows = load_queries(q, q_start, row, start - s + t, first, t, d, CHUNK, KEYS)
                gradient += product(tl.trans(pairs), rows, PRECISION)
        store_tokens(d_k, start, first, s, d, heads * d, gradient)
    token = (start + position).to(tl.int64)
    if right is not None:
        tl.store(d_beta + head * s + token, d_strengths - erasures, mask=token < s)
    if DECAY == "head":
        d_gate = crossed + tl.sum(overlaps, axis=0) * tl.load(total + chunk)
        # A gate decays what the tokens before it have written.
        d_gate += tl.cumsum(writes, axis=0) - writes
        if right is not None:
            erasures *= beta
            if UNDECAYED:
                # The gate of a token is in the reads of those after it.
                d_gate += erasures
            reads -= erasures
        d_gate += tl.cumsum(reads, axis=0, reverse=True)
        tl.store(d_g + head * s + token, d_gate, mask=token < s)
