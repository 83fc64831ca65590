"""The states between chunks, and their gradients: the sequential part of the recurrence.

    U = Y − W S,                    S ← total ∘ S + Kᵀ (writing ∘ U),
    dU = A + writing ∘ (K dS),      dS ← total ∘ dS + s Qᵀ (reading ∘ dO) − Wᵀ dU,

with Y and W of `delta_rule.py`; in an additive recurrence U = V and W = 0. A is the part of dU from
the outputs of the same chunk (`chunk_reads.py`). Grid: one program per block of value channels of
one head. It loops over the chunks, with d × block elements of the state in registers. All other
work is done for all chunks at once, by other kernels.

For T tokens of a head, forward 4 T d e FLOPs (additive 2), backward 6 (additive 4). Memory traffic
is dominated by a state of d e elements per chunk, written once.

If CCQ's query reads the same keys, a program of the forward pass also computes some columns of
their moments (`moments.py`). One tile of keys serves both products, and the second depends on
nothing else, so that it runs while the first waits for U of the chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.recurrence.chunk_tiles import head_of, product, store_rows
from precondattn_triton.recurrence.moments import moments_after, store_moments
from precondattn_triton.tiles import load_rows, load_tokens


@triton.jit
def decay_of_chunk(
    total, chunk, first,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """The decay of a block of the state over a chunk: one factor, or one per row or column."""
    if DECAY == "head":
        decay = tl.load(total + chunk)
    elif DECAY == "keys":
        decay = tl.load(total + chunk * WIDTH + tl.arange(0, WIDTH))[:, None]
    elif DECAY == "values":
        decay = tl.load(total + chunk * STEP + first + tl.arange(0, BLOCK))[None, :]
    else:
        decay = 1.0
    return decay


@triton.jit
def carry_states(
    k,
    v,
    y,
    w,
    u,
    decayed_k,
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
    """Write the state before every chunk to `states` (m, chunks, WIDTH, STEP), the last to `final`.

    `initial` and `final` are (m, d, e). With the delta rule, U is written to `u` (m, T, STEP). With
    a gate per key channel, `decayed_k` (m, T, WIDTH) is writing ∘ K.

    If `moments` is not None, it, `sums` and `counts` are computed as by `carry_moments`, COLUMNS
    columns by each program, of the keys `unit`: these are k, or k times `unit_scale`.
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
    # The first of the state heads that share a key head computes the moments.
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
            state_keys = load_rows(w, head, tokens, start, CHUNK, WIDTH, 0, WIDTH)
            written -= product(state_keys, state, PRECISION)
            store_rows(u, head, tokens, start, first, written, STEP)
        else:
            written = load_tokens(v, start, first, s, e, v_s, v_e, CHUNK, BLOCK)
        at_chunk = head * count + index
        state *= decay_of_chunk(total, at_chunk, first, BLOCK, WIDTH, STEP, DECAY)
        if DECAY == "head":
            decay = tl.load(writing + head * tokens + start + tl.arange(0, CHUNK))
            written = written * decay[:, None]
        if DECAY == "values":
            written = written * load_rows(writing, head, tokens, start, CHUNK, BLOCK, first, STEP)
        if DECAY == "keys":
            keys = load_rows(decayed_k, head, tokens, start, CHUNK, WIDTH, 0, WIDTH)
        else:
            keys = load_tokens(k, start, 0, s, d, k_s, k_d, CHUNK, WIDTH)
        if moments is not None and written.dtype == tl.float32:
            # One tile for both products: a second tile of 16 bits does not fit the registers.
            keys = keys.to(tl.float32)
        state += product(tl.trans(keys), written, PRECISION)
        if moments is not None:
            at_moments = key_head * count + index
            store_moments(
                moments, sums, counts, at_moments, column, has_moments, second, mean, number, WIDTH
            )
            second, mean, number = moments_after(
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
    decayed_q,
    decayed_k,
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
    """Write the gradient of the state after every chunk to `d_states` (m, chunks, WIDTH, STEP).

    The gradient of the first state is written to `d_initial` (m, d, e), that of U to `d_u` (m, T,
    STEP). With a gate per key channel, `decayed_q` (m r, T, WIDTH) is reading ∘ Q and `decayed_k`
    (m, T, WIDTH) is writing ∘ K.
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
            keys = load_rows(decayed_k, head, tokens, start, CHUNK, WIDTH, 0, WIDTH)
        else:
            keys = load_tokens(k, start, 0, s, d, k_s, k_d, CHUNK, WIDTH)
        d_written = product(keys, d_state, PRECISION)
        if DECAY == "head":
            d_written *= tl.load(writing + numbers)[:, None]
        if DECAY == "values":
            d_written *= load_rows(writing, head, tokens, start, CHUNK, BLOCK, first, STEP)
        d_state *= decay_of_chunk(total, at_chunk, first, BLOCK, WIDTH, STEP, DECAY)
        d_written += load_rows(local, head, tokens, start, CHUNK, BLOCK, first, STEP)
        store_rows(d_u, head, tokens, start, first, d_written, STEP)
        for row in range(queries):
            if DECAY == "keys":
                at = head * queries + row
                rows = load_rows(decayed_q, at, tokens, start, CHUNK, WIDTH, 0, WIDTH)
            else:
                rows = load_tokens(q + row * q_r, start - s + t, 0, t, d, q_t, q_d, CHUNK, WIDTH)
            outputs = d_o + row * o_r
            cotangent = load_tokens(outputs, start - s + t, first, t, e, o_t, o_e, CHUNK, BLOCK)
            cotangent = cotangent * scale
            if DECAY == "head":
                cotangent *= tl.load(reading + numbers)[:, None]
            if DECAY == "values":
                cotangent *= load_rows(reading, head, tokens, start, CHUNK, BLOCK, first, STEP)
            d_state += product(tl.trans(rows), cotangent, PRECISION)
        if w is not None:
            rows = load_rows(w, head, tokens, start, CHUNK, WIDTH, 0, WIDTH)
            d_state -= product(tl.trans(rows), d_written, PRECISION)
    tl.store(d_initial + ends, d_state, mask=inside)
