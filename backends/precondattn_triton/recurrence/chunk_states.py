"""The states between chunks, and their gradients: what has to go from chunk to chunk.

    U = Y − W S,                    S ← total ∘ S + Kᵀ (writing ∘ U),
    dU = A + writing ∘ (K dS),      dS ← total ∘ dS + s Qᵀ (reading ∘ dO) − Wᵀ dU,

with Y and W of `delta_rule.py`, where values are added U = V and W = 0; A is what the chunk's own
outputs make of U's gradient (`chunk_reads.py`). A program has a block of value channels of one
head, and goes over the chunks with its d × block of the state in registers. Everything else that
chunks have to do is done for all of them at once.

For T tokens of a head, forward 4 T d e FLOPs (additive 2), backward 6 (additive 4); memory traffic
is dominated by a state of d e numbers for every chunk, written once.

Where CCQ's query reads the same keys, a program of the forward pass has some columns of their
moments besides (`moments.py`): its tile of keys serves both products, and the second, which waits
for nothing, goes on while the first waits for what a chunk writes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.recurrence.chunk_tiles import head_of, product, store_rows
from precondattn_triton.recurrence.moments import moments_behind, store_moments
from precondattn_triton.tiles import load_rows, load_tokens


@triton.jit
def kept_of(
    total, chunk, first,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """What a chunk keeps of a block of the state: a number, or one for each row or column."""
    if DECAY == "head":
        kept = tl.load(total + chunk)
    elif DECAY == "keys":
        kept = tl.load(total + chunk * WIDTH + tl.arange(0, WIDTH))[:, None]
    elif DECAY == "values":
        kept = tl.load(total + chunk * STEP + first + tl.arange(0, BLOCK))[None, :]
    else:
        kept = 1.0
    return kept


@triton.jit
def carry_states(
    k,
    v,
    y,
    w,
    u,
    faded_k,
    writing,
    total,
    initial,
    states,
    final,
    unit,
    unit_scale,
    unit_valid,
    unit_writing,
    unit_total,
    moments,
    sums,
    counts,
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
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    DECAY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`states` (m, chunks, WIDTH, STEP) gets the state in front of every chunk, `final` the last.

    `initial` and `final` are (m, d, e). By the delta rule `u` (m, T, STEP) gets U. Where
    each key channel has its gate, writing ∘ K comes as `faded_k` (m, T, WIDTH).

    If there are `moments`, they and `sums` and `counts` are made as by `carry_moments`, COLUMNS
    columns by each program: of `unit`, which k is, or with `unit_scale` times k is.
    """
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK
    count = tokens // CHUNK
    k = head_of(k, head, heads, k_b, k_m, k_group)
    v = head_of(v, head, heads, v_b, v_m, v_group)
    key, channel = tl.arange(0, WIDTH), first + tl.arange(0, BLOCK)
    at = (head * d + key[:, None]) * e + channel[None, :]
    inside = (key < d)[:, None] & (channel < e)[None, :]
    state = tl.load(initial + at, mask=inside, other=0.0)
    # Of the heads with a state that share their keys, the first has the moments.
    key_head, has_moments = head // k_group, head % k_group == 0
    column = tl.program_id(0) * COLUMNS
    if moments is not None:
        second = tl.zeros((WIDTH, COLUMNS), tl.float32)
        mean = tl.zeros((COLUMNS,), tl.float32)
        number = tl.zeros((1,), tl.float32)
    for index in range(count):
        start = index * CHUNK
        store_rows(states, head * count + index, WIDTH, 0, first, state, STEP)
        if w is not None:
            written = load_rows(y, head, tokens, start, CHUNK, BLOCK, first, STEP)
            own = load_rows(w, head, tokens, start, CHUNK, WIDTH, 0, WIDTH)
            written -= product(own, state, PRECISION)
            store_rows(u, head, tokens, start, first, written, STEP)
        else:
            written = load_tokens(v, start, first, s, e, v_s, v_e, CHUNK, BLOCK)
        at_chunk = head * count + index
        state *= kept_of(total, at_chunk, first, BLOCK, WIDTH, STEP, DECAY)
        if DECAY == "head":
            fading = tl.load(writing + head * tokens + start + tl.arange(0, CHUNK))
            written = written * fading[:, None]
        if DECAY == "values":
            written = written * load_rows(writing, head, tokens, start, CHUNK, BLOCK, first, STEP)
        if DECAY == "keys":
            keys = load_rows(faded_k, head, tokens, start, CHUNK, WIDTH, 0, WIDTH)
        else:
            keys = load_tokens(k, start, 0, s, d, k_s, k_d, CHUNK, WIDTH)
        if moments is not None and written.dtype == tl.float32:
            # One tile for both products: another of 16 bits does not fit the registers.
            keys = keys.to(tl.float32)
        state += product(tl.trans(keys), written, PRECISION)
        if moments is not None:
            at_moments = key_head * count + index
            store_moments(
                moments, sums, counts, at_moments, column, has_moments, second, mean, number, WIDTH
            )
            second, mean, number = moments_behind(
                second, mean, number, keys, unit_scale, unit, unit_valid, unit_writing, unit_total,
                moments, key_head, heads // k_group, index, tokens, column, s, d,
                CHUNK, COLUMNS, PRECISION,
            )  # fmt: skip
    tl.store(final + at, state, mask=inside)


@triton.jit
def carry_gradients(
    q,
    k,
    w,
    d_o,
    local,
    faded_q,
    faded_k,
    reading,
    writing,
    total,
    d_final,
    d_states,
    d_u,
    d_initial,
    heads,
    queries,
    s,
    t,
    tokens,
    d,
    e,
    scale,
    q_b,
    q_m,
    q_t,
    q_r,
    q_d,
    q_group,
    k_b,
    k_m,
    k_s,
    k_d,
    k_group,
    o_b,
    o_m,
    o_t,
    o_r,
    o_e,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    DECAY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`d_states` (m, chunks, WIDTH, STEP) gets the gradient of the state behind every chunk.

    `d_initial` (m, d, e) gets that of the first, and `d_u` (m, T, STEP) that of U.
    Where each key channel has its gate, reading ∘ Q (m r, T, WIDTH) and writing ∘ K (m, T, WIDTH)
    come as `faded_q` and `faded_k`.
    """
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK
    count = tokens // CHUNK
    q = head_of(q, head, heads, q_b, q_m, q_group)
    k = head_of(k, head, heads, k_b, k_m, k_group)
    d_o = head_of(d_o, head, heads, o_b, o_m, 1)
    key, channel = tl.arange(0, WIDTH), first + tl.arange(0, BLOCK)
    ends = (head * d + key[:, None]) * e + channel[None, :]
    inside = (key < d)[:, None] & (channel < e)[None, :]
    d_state = tl.load(d_final + ends, mask=inside, other=0.0)
    for step in range(count):
        index = count - 1 - step
        start = index * CHUNK
        numbers = head * tokens + start + tl.arange(0, CHUNK)
        store_rows(d_states, head * count + index, WIDTH, 0, first, d_state, STEP)
        at_chunk = head * count + index
        if DECAY == "keys":
            keys = load_rows(faded_k, head, tokens, start, CHUNK, WIDTH, 0, WIDTH)
        else:
            keys = load_tokens(k, start, 0, s, d, k_s, k_d, CHUNK, WIDTH)
        found = product(keys, d_state, PRECISION)
        if DECAY == "head":
            found *= tl.load(writing + numbers)[:, None]
        if DECAY == "values":
            found *= load_rows(writing, head, tokens, start, CHUNK, BLOCK, first, STEP)
        d_state *= kept_of(total, at_chunk, first, BLOCK, WIDTH, STEP, DECAY)
        found += load_rows(local, head, tokens, start, CHUNK, BLOCK, first, STEP)
        store_rows(d_u, head, tokens, start, first, found, STEP)
        for row in range(queries):
            if DECAY == "keys":
                at = head * queries + row
                own = load_rows(faded_q, at, tokens, start, CHUNK, WIDTH, 0, WIDTH)
            else:
                own = load_tokens(q + row * q_r, start - s + t, 0, t, d, q_t, q_d, CHUNK, WIDTH)
            outputs = d_o + row * o_r
            cotangent = load_tokens(outputs, start - s + t, first, t, e, o_t, o_e, CHUNK, BLOCK)
            cotangent = cotangent * scale
            if DECAY == "head":
                cotangent *= tl.load(reading + numbers)[:, None]
            if DECAY == "values":
                cotangent *= load_rows(reading, head, tokens, start, CHUNK, BLOCK, first, STEP)
            d_state += product(tl.trans(own), cotangent, PRECISION)
        if w is not None:
            own = load_rows(w, head, tokens, start, CHUNK, WIDTH, 0, WIDTH)
            d_state -= product(tl.trans(own), found, PRECISION)
    tl.store(d_initial + ends, d_state, mask=inside)
