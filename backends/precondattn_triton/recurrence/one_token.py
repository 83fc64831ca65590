"""One token of a recurrence: every state is read once and written once.

    S' = Γ ∘ S,    u = v  (additive),  β (v − S'ᵀ k)  (delta rule),    S = S' + k uᵀ,    o = s Sᵀ q

A program has a block of value channels of one head, d × block numbers of its state, and all r
queries that read it. Everything is in float32, and there are no products of tiles: 7 d e FLOPs for
8 d e bytes wait for memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.recurrence.chunk_tiles import head_of


@triton.jit
def load_channels(array, channel, width, stride):
    """Channels of one token of one head, in float32."""
    return tl.load(array + channel * stride, mask=channel < width, other=0.0).to(tl.float32)


@triton.jit
def step(
    q,
    k,
    v,
    g,
    beta,
    initial,
    final,
    o,
    heads,
    queries,
    d,
    e,
    scale,
    q_b,
    q_m,
    q_r,
    q_d,
    q_group,
    k_b,
    k_m,
    k_d,
    k_group,
    v_b,
    v_m,
    v_e,
    v_group,
    g_b,
    g_m,
    g_d,
    g_e,
    beta_b,
    beta_m,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`final` (m, d, e) of `initial`, and `o` (b, 1, m, r, e).

    Gates are of each head, key channel or value channel, and have a stride of 0 where they are not.
    """
    head = tl.program_id(1).to(tl.int64)
    key = tl.arange(0, WIDTH).to(tl.int64)
    channel = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    at = (head * d + key[:, None]) * e + channel[None, :]
    inside = (key < d)[:, None] & (channel < e)[None, :]
    state = tl.load(initial + at, mask=inside, other=0.0)
    if g is not None:
        places = key[:, None] * g_d + channel[None, :] * g_e
        gates = head_of(g, head, heads, g_b, g_m, 1) + places
        state *= tl.exp(tl.load(gates, mask=inside, other=0.0).to(tl.float32))
    keys = load_channels(head_of(k, head, heads, k_b, k_m, k_group), key, d, k_d)
    written = load_channels(head_of(v, head, heads, v_b, v_m, v_group), channel, e, v_e)
    if beta is not None:
        strength = tl.load(head_of(beta, head, heads, beta_b, beta_m, 1)).to(tl.float32)
        written = strength * (written - tl.sum(state * keys[:, None], axis=0))
    state += keys[:, None] * written[None, :]
    tl.store(final + at, state, mask=inside)
    q = head_of(q, head, heads, q_b, q_m, q_group)
    for row in range(queries):
        own = load_channels(q + row * q_r, key, d, q_d)
        found = scale * tl.sum(state * own[:, None], axis=0)
        place = o + (head * queries + row) * e + channel
        tl.store(place, found.to(o.dtype.element_ty), mask=channel < e)
