"""The gradient of the recurrence in chunks: launches, in the order of their dependencies.

From the states before every chunk and the arrays prepared for the delta rule: first the part of U's
gradient from the chunks' own outputs; then, from the last chunk to the first, the gradients of
states and of U; then the rest for all chunks at once.
"""

from __future__ import annotations

from typing import NamedTuple

from precondattn.arrays import Array, namespace
from precondattn.spec.recurrence import Stream, StreamGradients
from precondattn_cupy.layout import in_one_piece
from precondattn_cupy.recurrence.chunk_arrays import ChunkCall, heads_first, tokens_first
from precondattn_cupy.recurrence.chunkwise import Carried, PreparedChunks


class Back(NamedTuple):
    """Arrays computed from the gradients of the states."""

    d_states: Array
    """The gradients of the states after every chunk (m, chunks, width, step)"""
    d_u: Array
    """dU (m, T, step)"""
    d_initial: Array
    """(b, m, d, e)"""


class OfDelta(NamedTuple):
    """The delta rule's results from dU; all None for additive states."""

    d_right: Array | None = None
    """X (m, T, step)"""
    d_keys: Array | None = None
    """(m, T, C)"""
    d_strength: Array | None = None
    """(m, T)"""
    crossing: Array | None = None
    """(m, T)"""


def gradients(
    call: ChunkCall,
    x: Stream,
    prepared: PreparedChunks,
    carried: Carried,
    d_o: Array,
    d_final: Array,
) -> StreamGradients:
    """The gradients of a call, from the states of its forward pass."""
    d_o = tokens_first(namespace(d_o).astype(d_o, call.k.dtype, copy=False))
    back = _carry_back(call, prepared, d_o, d_final)
    d_scores, crossing = _d_scores(call, prepared, carried, d_o)
    d_v, of_delta = _d_values(call, x, prepared, carried, back)
    d_q, read = _d_queries(call, prepared, carried, d_o, d_scores)
    d_k, written, from_keys, overlap = _d_keys(call, prepared, carried, back, d_scores, of_delta)
    d_a = None
    if call.a is not None:
        d_a, from_keys = _d_erased(call, call.a, prepared, carried, of_delta)
    d_g = None if call.g is None else call.scratch(call.b, call.s, call.m)
    d_beta = None if call.beta is None else call.scratch(call.b, call.s, call.m)
    if d_g is not None or d_beta is not None:
        sums = (crossing, of_delta.crossing, read, written, overlap, from_keys)
        arrays = (prepared.sums, prepared.strength, *sums, of_delta.d_strength, d_g, d_beta)
        numbers = (call.m, call.r, call.s, call.tokens, call.key_blocks)
        call.launch("gate_gradient", (call.count, call.heads), (*arrays, *numbers), 8 * call.chunk)
    xp = namespace(call.k)
    d_gates = xp.zeros_like(x.g) if d_g is None else heads_first(d_g)[..., None, None]
    d_strength = None if d_beta is None else heads_first(d_beta)
    d_erase = None if d_a is None else heads_first(d_a)
    stream = Stream(heads_first(d_q), heads_first(d_k), d_v, d_gates, d_strength, d_erase)
    return StreamGradients(stream, back.d_initial)


def _carry_back(call: ChunkCall, prepared: PreparedChunks, d_o: Array, d_final: Array) -> Back:
    local = call.scratch(call.heads, call.tokens, call.step)
    heads = (call.m, call.r, call.q_heads, call.k_heads)
    sizes = (call.s, call.t, call.tokens, call.d, call.e, call.step)
    call.launch(
        "read_back",
        (call.count * call.value_blocks, call.heads),
        (call.q, call.k, d_o, prepared.sums, local, *heads, *sizes, call.scale),
        call.tile(2 * call.chunk, call.block)
        + call.tile(call.chunk, call.chunk)
        + call.sums_of_rows(),
        call.chunk,
        call.block,
    )
    d_states = call.scratch(call.heads, call.count, call.width, call.step)
    d_u = call.scratch(call.heads, call.tokens, call.step)
    d_initial = call.scratch(call.b, call.m, call.d, call.e)
    arrays = (call.q, call.k, prepared.w, d_o, local, prepared.sums, in_one_piece(d_final))
    call.launch(
        "carry_gradients",
        (-(-call.step // call.values), call.heads),
        (*arrays, d_states, d_u, d_initial, *heads, *sizes, call.scale),
        call.tile(2 * call.chunk, call.width)
        + call.tile(call.width + 2 * call.chunk, call.values)
        + call.sums_of_rows(),
        call.chunk,
        call.width,
        call.values,
    )
    return Back(d_states, d_u, d_initial)


def _d_scores(
    call: ChunkCall, prepared: PreparedChunks, carried: Carried, d_o: Array
) -> tuple[Array, Array | None]:
    """dA (m r, T, C), and its part of the gates' gradient (m r, T)."""
    queries = call.heads * call.r
    d_scores = call.scratch(queries, call.tokens, call.chunk)
    crossing = None if call.g is None else call.scratch(queries, call.tokens)
    arrays = (call.q, call.k, call.v, carried.u, d_o, prepared.sums, d_scores, crossing)
    heads = (call.m, call.r, call.q_heads, call.k_heads, call.v_heads)
    sizes = (call.s, call.t, call.tokens, call.d, call.e, call.step)
    call.launch(
        "d_scores_of",
        (call.count, queries),
        (*arrays, *heads, *sizes, call.scale),
        call.tile(2 * call.chunk, call.block)
        + call.tile(call.chunk, call.chunk)
        + call.sums_of_rows(),
        call.chunk,
        call.block,
    )
    return d_scores, crossing


def _d_values(
    call: ChunkCall, x: Stream, prepared: PreparedChunks, carried: Carried, back: Back
) -> tuple[Array, OfDelta]:
    """dV (b, m, s, e), and with the delta rule the other results from dU."""
    heads, tokens = call.heads, call.tokens
    if call.beta is None:
        d_v = namespace(back.d_u).reshape(back.d_u, (call.b, call.m, tokens, call.step))
        return d_v[:, :, : call.s, : call.e], OfDelta()
    result = OfDelta(
        call.scratch(heads, tokens, call.step),
        call.scratch(heads, tokens, call.chunk),
        call.scratch(heads, tokens),
        None if call.g is None else call.scratch(heads, tokens),
    )
    d_v = call.of_heads(x.v, call.v_heads, call.b, call.s, call.m, call.e)
    inputs = (prepared.sums, prepared.strength, prepared.inverse, carried.u, back.d_u)
    results = (result.d_right, d_v, result.d_keys, result.d_strength, result.crossing)
    numbers = (call.m, call.k_heads, call.a_heads, call.v_heads, call.s, tokens)
    widths = (call.d, call.e, call.step)
    call.launch(
        "delta_gradient",
        (call.count, heads),
        (call.k, call.a, call.v, *inputs, *results, *numbers, *widths),
        call.tile(call.chunk, call.chunk)
        + call.tile(call.chunk, call.chunk)
        + call.tile(4 * call.chunk, call.block)
        + call.sums_of_rows(),
        call.chunk,
        call.block,
        *call.erases,
        out=d_v,
    )
    return heads_first(d_v), result


def _d_queries(
    call: ChunkCall, prepared: PreparedChunks, carried: Carried, d_o: Array, d_scores: Array
) -> tuple[Array, Array | None]:
    """dQ (b, t, m, r, d), and Σ Q ∘ dQ of the part from the states (m r, blocks, T)."""
    queries = call.heads * call.r
    read = None if call.g is None else call.scratch(queries, call.key_blocks, call.tokens)
    d_q = call.of_heads(call.q, call.q_heads, call.b, call.t, call.m, call.r, call.d)
    arrays = (call.q, call.k, d_o, prepared.sums, d_scores, carried.states, d_q, read)
    heads = (call.m, call.r, call.q_heads, call.k_heads)
    sizes = (call.s, call.t, call.tokens, call.d, call.e, call.width, call.step)
    call.launch(
        "d_queries",
        (call.count * call.key_blocks, queries),
        (*arrays, *heads, *sizes, call.scale),
        call.tile(2 * call.chunk + call.block, call.block)
        + call.tile(call.chunk, call.chunk)
        + call.sums_of_rows(),
        call.chunk,
        call.block,
        out=d_q,
    )
    return d_q, read


def _d_keys(
    call: ChunkCall,
    prepared: PreparedChunks,
    carried: Carried,
    back: Back,
    d_scores: Array,
    of_delta: OfDelta,
) -> tuple[Array, Array | None, Array | None, Array | None]:
    """dK (b, s, m, d), and the kernel's `written`, `from_keys` and `overlap`."""
    heads, blocks, tokens = call.heads, call.key_blocks, call.tokens
    written = overlap = from_keys = None
    if call.g is not None:
        written = call.scratch(heads, blocks, tokens)
        overlap = call.scratch(heads, call.count, blocks)
    if call.beta is not None and call.a is None:
        from_keys = call.scratch(heads, blocks, tokens)
    d_k = call.of_heads(call.k, call.k_heads, call.b, call.s, call.m, call.d)
    keys_and_values = (call.q, call.k, call.a, call.v, carried.u)
    inputs = (*keys_and_values, prepared.sums, prepared.strength, d_scores)
    of_states = (of_delta.d_right, of_delta.d_keys, carried.states, back.d_states)
    numbers = (call.m, call.r, call.q_heads, call.k_heads, call.a_heads, call.v_heads)
    sizes = (call.s, call.t, tokens, call.d, call.e, call.width, call.step)
    call.launch(
        "d_keys_of",
        (call.count * blocks, heads),
        (*inputs, *of_states, d_k, written, from_keys, overlap, *numbers, *sizes),
        call.tile(2 * call.chunk + 2 * call.block, call.block)
        + call.tile(call.chunk, call.chunk)
        + call.sums_of_rows()
        + 64,
        call.chunk,
        call.block,
        *call.erases,
        out=d_k,
    )
    return d_k, written, from_keys, overlap


def _d_erased(
    call: ChunkCall, a: Array, prepared: PreparedChunks, carried: Carried, of_delta: OfDelta
) -> tuple[Array, Array]:
    """The gradient of the keys that are erased (b, s, m, d), and the kernel's `from_keys`."""
    heads, blocks, tokens = call.heads, call.key_blocks, call.tokens
    from_keys = call.scratch(heads, blocks, tokens)
    d_a = call.of_heads(a, call.a_heads, call.b, call.s, call.m, call.d)
    inputs = (call.k, a, prepared.sums, prepared.strength, of_delta.d_right, of_delta.d_keys)
    numbers = (call.m, call.k_heads, call.a_heads, call.s, tokens)
    call.launch(
        "d_erased_of",
        (call.count * blocks, heads),
        (*inputs, carried.states, d_a, from_keys, *numbers, call.d, call.e, call.width, call.step),
        call.tile(2 * call.chunk + call.block, call.block)
        + call.tile(call.chunk, call.chunk)
        + call.sums_of_rows(),
        call.chunk,
        call.block,
        out=d_a,
    )
    return d_a, from_keys
