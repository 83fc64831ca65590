"""The states between chunks, and their gradients: the sequential part of the recurrence.

    U = Y − W S,            S ← total ∘ S + Kᵀ (writing ∘ U),
    X = Mᵀ A + Z dS,        dS ← total ∘ dS + s Qᵀ (reading ∘ dO) − Eᵀ (β ∘ reading ∘ X),

with Y, W, Z and Mᵀ A of `delta_rule.py`; in an additive recurrence U = V, and there is no X. With a
gate per channel, its dU = A + writing ∘ (K dS) is computed here, with A of `chunk_reads.py`. Grid:
one program per block of value channels of one head. It loops over the chunks, with d × block
elements of the state in registers. All other work is done for all chunks at once, by other kernels.

The state that is carried is in float32. The one that is stored, and multiplied, is a factor of
products only, and in bfloat16 rounded to it.

For T tokens of a head, forward 4 T d e FLOPs (additive 2), backward 6 (additive 2, with a gate per
channel 4). Memory traffic is that of the rows, and a state of d e elements per chunk, written once.

If CCQ's query reads the same keys, a program of the forward pass also computes some columns of
their moments (`moments.py`). One tile of keys serves both products, and the second depends on
nothing else, so that it runs while the first waits for U of the chunk. With a gate per key channel
there are two tiles, one of them decayed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.recurrence.chunk_tiles import (
    as_factor,
    head_of,
    load_head,
    load_queries,
    product,
    store_rows,
)
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
    k, v, y, w, u, decayed_k, writing, total, initial, states, final, moments, sizes,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    STEP: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the state before every chunk to `states` (m, chunks, WIDTH, STEP), the last to `final`.

    `initial` and `final` are (m, d, e); the first is None for 0. With the delta rule, U is written
    to `u` (m, T, STEP). With a gate per key channel, `decayed_k` (m, T, WIDTH) is writing ∘ K.

    If `moments` is not None, they are computed as by `carry_moments`, COLUMNS columns by each
    program. Their keys are k, or k times `moments.scale`, or, with a gate per key channel, read for
    the moments.
    """
    heads, s, tokens, d, e = sizes.heads, sizes.s, sizes.tokens, sizes.d, sizes.e
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK
    count = tokens // CHUNK
    k_start = head_of(k, head, heads)
    v_start = head_of(v, head, heads)
    key, channel = tl.arange(0, WIDTH), first + tl.arange(0, BLOCK)
    at = (head * d + key[:, None]) * e + channel[None, :]
    inside = (key < d)[:, None] & (channel < e)[None, :]
    if initial is None:
        state = tl.zeros((WIDTH, BLOCK), tl.float32)
    else:
        state = tl.load(initial + at, mask=inside, other=0.0)
    # The first of the state heads that share a key head computes the moments.
    key_head, has_moments = head // k.group, head % k.group == 0
    column = tl.program_id(0) * COLUMNS
    if moments is not None:
        second = tl.zeros((WIDTH, COLUMNS), tl.float32)
        mean = tl.zeros((COLUMNS,), tl.float32)
        number = tl.zeros((1,), tl.float32)
    for index in range(count):
        start = index * CHUNK
        factor = as_factor(state, states)
        store_rows(states, head * count + index, WIDTH, 0, first, factor, STEP)
        if w is not None:
            written = load_rows(y, head, tokens, start, CHUNK, BLOCK, first, STEP).to(tl.float32)
            state_keys = load_rows(w, head, tokens, start, CHUNK, WIDTH, 0, WIDTH)
            written -= product(state_keys, factor, PRECISION)
            store_rows(u, head, tokens, start, first, written, STEP)
        else:
            written = load_head(v, v_start, start, first, s, e, CHUNK, BLOCK)
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
            keys = load_head(k, k_start, start, 0, s, d, CHUNK, WIDTH)
        if w is not None or DECAY == "head" or DECAY == "values":
            written = as_factor(written, states)
        if moments is not None and written.dtype == tl.float32:
            # One tile for both products: a second tile of 16 bits does not fit the registers.
            keys = keys.to(tl.float32)
        state += product(tl.trans(keys), written, PRECISION)
        if moments is not None:
            if DECAY == "keys":
                # The moments have no decay: another tile, of the keys of length 1.
                key_heads = heads // k.group
                unit_at = (key_head // key_heads * s * key_heads + key_head % key_heads) * d
                keys = load_tokens(
                    moments.keys + unit_at, start, 0, s, d, key_heads * d, 1, CHUNK, WIDTH
                )
            at_moments = key_head * count + index
            store_moments(moments, at_moments, column, has_moments, second, mean, number, WIDTH)
            second, mean, number = moments_after(
                second, mean, number, keys, moments, key_head, heads // k.group, index, tokens,
                column, s, d, CHUNK, COLUMNS, PRECISION,
            )  # fmt: skip
    tl.store(final + at, state, mask=inside)


@triton.jit
def carry_gradients(
    q, k, erase, d_o, z, local, eraser, decayed_q, decayed_k, strength, reading, erasing, writing,
    total, d_final, d_states, right, d_u, d_initial, sizes,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
    DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the state after every chunk to `d_states` (m, chunks, WIDTH, STEP).

    The gradient of the first state is written to `d_initial` (m, d, e). With the delta rule, X is
    written to `right` (m, T, STEP); otherwise, with a gate per channel, dU to `d_u` (m, T, STEP).
    With a gate per key channel, `decayed_q` (m r, T, WIDTH) is reading ∘ Q, `decayed_k` (m, T,
    WIDTH) is writing ∘ K, and `eraser` (m, T, WIDTH) is β ∘ reading ∘ E.
    """
    heads, queries, s, t = sizes.heads, sizes.queries, sizes.s, sizes.t
    tokens, d, e, scale = sizes.tokens, sizes.d, sizes.e, sizes.scale
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK
    count = tokens // CHUNK
    q_start = head_of(q, head, heads)
    k_start = head_of(k, head, heads)
    if erase is not None:
        erase_start = head_of(erase, head, heads)
    d_o_start = head_of(d_o, head, heads)
    key, channel = tl.arange(0, WIDTH), first + tl.arange(0, BLOCK)
    ends = (head * d + key[:, None]) * e + channel[None, :]
    inside = (key < d)[:, None] & (channel < e)[None, :]
    if d_final is None:
        d_state = tl.zeros((WIDTH, BLOCK), tl.float32)
    else:
        d_state = tl.load(d_final + ends, mask=inside, other=0.0)
    for step in range(count):
        index = count - 1 - step
        start = index * CHUNK
        numbers = head * tokens + start + tl.arange(0, CHUNK)
        factor = as_factor(d_state, d_states)
        at_chunk = head * count + index
        store_rows(d_states, at_chunk, WIDTH, 0, first, factor, STEP)
        if z is not None:
            senders = load_rows(z, head, tokens, start, CHUNK, WIDTH, 0, WIDTH)
            d_written = product(senders, factor, PRECISION)
            d_written += load_rows(local, head, tokens, start, CHUNK, BLOCK, first, STEP)
            store_rows(right, head, tokens, start, first, d_written, STEP)
        elif d_u is not None:
            if DECAY == "keys":
                keys = load_rows(decayed_k, head, tokens, start, CHUNK, WIDTH, 0, WIDTH)
            else:
                keys = load_head(k, k_start, start, 0, s, d, CHUNK, WIDTH)
            d_written = product(keys, factor, PRECISION)
            if DECAY == "values":
                d_written *= load_rows(writing, head, tokens, start, CHUNK, BLOCK, first, STEP)
            d_written += load_rows(local, head, tokens, start, CHUNK, BLOCK, first, STEP)
            store_rows(d_u, head, tokens, start, first, d_written, STEP)
        d_state *= decay_of_chunk(total, at_chunk, first, BLOCK, WIDTH, STEP, DECAY)
        for row in range(queries):
            if DECAY == "keys":
                at = head * queries + row
                rows = load_rows(decayed_q, at, tokens, start, CHUNK, WIDTH, 0, WIDTH)
            else:
                rows = load_queries(q, q_start, row, start - s + t, 0, t, d, CHUNK, WIDTH)
            cotangent = load_queries(d_o, d_o_start, row, start - s + t, first, t, e, CHUNK, BLOCK)
            cotangent = cotangent * scale
            if DECAY == "head":
                cotangent *= tl.load(reading + numbers)[:, None]
            if DECAY == "values":
                cotangent *= load_rows(reading, head, tokens, start, CHUNK, BLOCK, first, STEP)
            if DECAY == "head" or DECAY == "values":
                cotangent = as_factor(cotangent, d_states)
            d_state += product(tl.trans(rows), cotangent, PRECISION)
        if z is not None:
            if DECAY == "keys":
                erased = load_rows(eraser, head, tokens, start, CHUNK, WIDTH, 0, WIDTH)
            else:
                if erase is not None:
                    erased = load_head(erase, erase_start, start, 0, s, d, CHUNK, WIDTH)
                else:
                    erased = load_head(k, k_start, start, 0, s, d, CHUNK, WIDTH)
                erases = tl.load(strength + numbers)
                if DECAY == "head":
                    erases *= tl.load(erasing + numbers)
                d_written *= erases[:, None]
            d_state -= product(tl.trans(erased), as_factor(d_written, d_states), PRECISION)
    tl.store(d_initial + ends, d_state, mask=inside)
