"""One token of a recurrence. Every state is read once and written once.

    S' = Γ ∘ S,    u = v  (additive),  β (v − S'ᵀ a)  (delta rule),    S = S' + k uᵀ,    o = s Sᵀ q

with a the key that is erased: k, unless another one is given, also from S in place of S'.

Grid: one program per block of value channels of one head. It holds d × block elements of the state
in registers, for all r queries that read it. Everything is in float32, without products of tiles:
with 7 d e FLOPs for 8 d e bytes, memory is the limit.
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
    q, k, v, erase, g, beta, initial, final, o, sizes,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, UNDECAYED: tl.constexpr,
):  # fmt: skip
    """Write the new state to `final` (m, d, e) and the output to `o` (b, 1, m, r, e).

    There is one gate per head, per key channel or per value channel; the strides of the other axes
    are 0.
    """
    heads, queries, d, e, scale = sizes.heads, sizes.queries, sizes.d, sizes.e, sizes.scale
    head = tl.program_id(1).to(tl.int64)
    key = tl.arange(0, WIDTH).to(tl.int64)
    channel = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    at = (head * d + key[:, None]) * e + channel[None, :]
    inside = (key < d)[:, None] & (channel < e)[None, :]
    if initial is None:
        state = tl.zeros((WIDTH, BLOCK), tl.float32)
    else:
        state = tl.load(initial + at, mask=inside, other=0.0)
    keys = load_channels(head_of(k, head, heads), key, d, k.channel)
    written = load_channels(head_of(v, head, heads), channel, e, v.channel)
    erased = keys
    if erase is not None:
        erased = load_channels(head_of(erase, head, heads), key, d, erase.channel)
    if UNDECAYED:
        written -= tl.sum(state * erased[:, None], axis=0)
    if g is not None:
        gate_at = key[:, None] * g.row + channel[None, :] * g.channel
        gates = head_of(g, head, heads) + gate_at
        state *= tl.exp(tl.load(gates, mask=inside, other=0.0).to(tl.float32))
    if beta is not None:
        strength = tl.load(head_of(beta, head, heads)).to(tl.float32)
        if not UNDECAYED:
            written -= tl.sum(state * erased[:, None], axis=0)
        written *= strength
    state += keys[:, None] * written[None, :]
    tl.store(final + at, state, mask=inside)
    q_start = head_of(q, head, heads)
    for row in range(queries):
        query = load_channels(q_start + row * q.row, key, d, q.channel)
        out = scale * tl.sum(state * query[:, None], axis=0)
        out_at = o + (head * queries + row) * e + channel
        tl.store(out_at, out.to(o.dtype.element_ty), mask=channel < e)
