"""The gradient of the keys E that are erased, if they are not K, with a gate per key channel.

    dE = … − reading ∘ β ∘ X Sᵀ,

with X of `delta_rule.py`, and S the state before the chunk. The part from within the chunk is
computed by `channel_decay.py`. For the gradients of β and of the gates the products of E with
reading ∘ X Sᵀ are also computed. Where E is K, `chunk_gradient.py` computes this with the rest of
dK. Grid: one program per chunk and block of key channels of one head. It iterates over the value
channels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.recurrence.chunk_tiles import head_of, product, store_rows, store_tokens
from precondattn_triton.tiles import load_rows, load_tokens


@triton.jit
def d_erase_of(
    erase,
    strength,
    reading,
    within_erase,
    right,
    states,
    d_erase,
    erased,
    from_keys,
    heads,
    s,
    tokens,
    d,
    erase_b,
    erase_m,
    erase_s,
    erase_d,
    erase_group,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write KEYS channels of `d_erase` (b, s, m, d).

    `from_keys` (m, blocks, T) gets Σ E ∘ (reading ∘ X Sᵀ), and `erased` (m, T, WIDTH) the products
    with β and without the sum. `within_erase` (m, T, WIDTH) is the part of dE from within the
    chunk.
    """
    BLOCKS: tl.constexpr = WIDTH // KEYS
    head = tl.program_id(1).to(tl.int64)
    chunk, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    start, first = chunk * CHUNK, block * KEYS
    erase = head_of(erase, head, heads, erase_b, erase_m, erase_group)
    from_state = tl.zeros((CHUNK, KEYS), tl.float32)
    for c in range(0, STEP, BLOCK):
        at = head * (tokens // CHUNK) + chunk
        state = load_rows(states, at, WIDTH, first, KEYS, BLOCK, c, STEP)
        rows = load_rows(right, head, tokens, start, CHUNK, BLOCK, c, STEP)
        from_state += product(rows, tl.trans(state), PRECISION)
    position = tl.arange(0, CHUNK)
    from_state *= load_rows(reading, head, tokens, start, CHUNK, KEYS, first, WIDTH)
    keys = load_tokens(erase, start, first, s, d, erase_s, erase_d, CHUNK, KEYS)
    read_keys = from_state * keys.to(tl.float32)
    sums = (head * BLOCKS + block) * tokens + start + position
    tl.store(from_keys + sums, tl.sum(read_keys, axis=1))
    beta = tl.load(strength + head * tokens + start + position)[:, None]
    gradient = -beta * from_state
    store_rows(erased, head, tokens, start, first, beta * read_keys, WIDTH)
    gradient += load_rows(within_erase, head, tokens, start, CHUNK, KEYS, first, WIDTH)
    d_erase += (head // heads * s * heads + head % heads) * d
    store_tokens(d_erase, start, first, s, d, heads * d, gradient)
