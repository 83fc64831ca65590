"""The recurrence of linear attention and the delta rule in chunks, by CUDA kernels.

    U = M β (V − reading ∘ A S)  (additive: U = V),    O = s (reading ∘ Q S + (D ∘ Q Kᵀ) U),
    S ← total S + (writing ∘ K)ᵀ U

with D and the factors of `cuda/chunk_tiles.cuh` and M of `cuda/chunk_delta.cu`; A are the keys that
are erased, K unless others are given. Chunks are prepared all at once (`cuda/chunk_delta.cu`),
states are passed from chunk to chunk (`cuda/chunk_states.cu`), and outputs are read all at once
(`cuda/chunk_reads.cu`). The gradient (`chunkwise_gradient.py`) recomputes the states, propagates
their gradients back, and computes the rest for all chunks at once. A single token has a separate
kernel (`cuda/recurrent_step.cu`).

Besides inputs, outputs and their gradients, memory holds a state of d e numbers in float32 for each
chunk, and M and two rows of numbers for each token; in the gradient, twice that and a few rows.
"""

from __future__ import annotations

from typing import NamedTuple

from precondattn.arrays import Array
from precondattn.spec.recurrence import AllTokens, Stream, StreamGradients
from precondattn_cupy.launch import cpp_type, launch
from precondattn_cupy.recurrence.chunk_arrays import ChunkCall, heads_first

STEP_WARPS = 8


class PreparedChunks(NamedTuple):
    """Arrays of chunks that do not depend on a state; None where the rule has no such array."""

    sums: Array | None
    """Cumulative sums of gates (m, T, 2)"""
    strength: Array | None
    """β (m, T)"""
    inverse: Array | None
    """M (m, T, C)"""
    y: Array | None
    """(m, T, step)"""
    w: Array | None
    """(m, T, width)"""


class Carried(NamedTuple):
    """Arrays computed from the states."""

    states: Array
    """The states before every chunk (m, chunks, width, step)"""
    u: Array | None
    """U, the rows that are written (m, T, step); None where these are the values"""
    last: Array
    """The state after all chunks (b, m, d, e)"""


class Chunkwise(AllTokens):
    """A `Form` of the recurrence (`precondattn.spec.recurrence`), with the outputs times `scale`.

    A stream's queries, keys and values may have fewer heads than the state; `decays` says whether
    there are gates. The queries' gradient does not include the scale.
    """

    def __init__(self, *, decays: bool, scale: float = 1.0) -> None:
        self.decays, self.scale = decays, scale

    def forward(self, x: Stream, state: Array) -> tuple[Array, Array]:
        call = ChunkCall(x, state, self.decays, self.scale)
        if call.s == 1 and call.t == 1:
            return _step(call)
        prepared = prepare(call)
        carried = carry(call, prepared)
        return _read(call, prepared, carried), carried.last

    def vjp(self, x: Stream, state: Array, d_o: Array, d_final: Array) -> StreamGradients:
        from precondattn_cupy.recurrence.chunkwise_gradient import gradients

        call = ChunkCall(x, state, self.decays, self.scale)
        prepared = prepare(call)
        return gradients(call, x, prepared, carry(call, prepared), d_o, d_final)


def _step(call: ChunkCall) -> tuple[Array, Array]:
    last = call.scratch(call.b, call.m, call.d, call.e)
    o = call.outputs(call.b, 1, call.m, call.r, call.e)
    arrays = (call.q, call.k, call.a, call.v, call.g, call.beta, call.initial, last, o)
    heads = (call.m, call.r, call.q_heads, call.k_heads, call.a_heads, call.v_heads)
    numbers = (*heads, call.d, call.e)
    sizes = ", ".join(map(str, (call.width, STEP_WARPS, *call.erases)))
    kernel = f"step_token<{cpp_type(call.k)}, {sizes}>"
    grid = (-(-call.e // 32), call.heads)
    launch("recurrent_step", kernel, grid, 32 * STEP_WARPS, (*arrays, *numbers, call.scale))
    return heads_first(o), last


def prepare(call: ChunkCall) -> PreparedChunks:
    """Sums of gates; with the delta rule also M, Y and W."""
    heads, tokens = call.heads, call.tokens
    sums = None if call.g is None else call.scratch(heads, tokens, 2)
    strength = None if call.beta is None else call.scratch(heads, tokens)
    grid = (call.count, heads)
    if sums is not None or strength is not None:
        arrays = (call.g, call.beta, sums, strength)
        call.launch("sum_gates", grid, (*arrays, call.m, call.s, tokens), 8 * call.chunk)
    if call.beta is None:
        return PreparedChunks(sums, None, None, None, None)
    inverse = call.scratch(heads, tokens, call.chunk)
    y, w = call.scratch(heads, tokens, call.step), call.scratch(heads, tokens, call.width)
    numbers = (call.m, call.k_heads, call.a_heads, call.v_heads, call.s, tokens)
    widths = (call.d, call.e, call.width, call.step)
    call.launch(
        "delta_prepare",
        grid,
        (call.k, call.a, call.v, sums, strength, inverse, y, w, *numbers, *widths),
        2 * call.tile(call.chunk, call.chunk)
        + call.tile(call.chunk, call.block)
        + call.sums_of_rows(),
        call.chunk,
        call.block,
        *call.erases,
    )
    return PreparedChunks(sums, strength, inverse, y, w)


def carry(call: ChunkCall, prepared: PreparedChunks) -> Carried:
    """The states between chunks."""
    last = call.scratch(call.b, call.m, call.d, call.e)
    states = call.scratch(call.heads, call.count, call.width, call.step)
    u = None if call.beta is None else call.scratch(call.heads, call.tokens, call.step)
    arrays = (call.k, call.v, prepared.y, prepared.w, u, prepared.sums, call.initial, states, last)
    numbers = (call.m, call.k_heads, call.v_heads, call.s, call.tokens, call.d, call.e, call.step)
    call.launch(
        "carry_states",
        (-(-call.step // call.values), call.heads),
        (*arrays, *numbers),
        call.tile(2 * call.chunk, call.width)
        + call.tile(call.width + call.chunk, call.values)
        + call.sums_of_rows(),
        call.chunk,
        call.width,
        call.values,
    )
    return Carried(states, u, last)


def _read(call: ChunkCall, prepared: PreparedChunks, carried: Carried) -> Array:
    """The outputs (b, m, t, r, e)."""
    o = call.outputs(call.b, call.t, call.m, call.r, call.e)
    arrays = (call.q, call.k, call.v, carried.u, prepared.sums, carried.states, o)
    heads = (call.m, call.r, call.q_heads, call.k_heads, call.v_heads)
    sizes = (call.s, call.t, call.tokens, call.d, call.e, call.width, call.step)
    call.launch(
        "read_chunks",
        (call.count * call.value_blocks, call.heads * call.r),
        (*arrays, *heads, *sizes, call.scale),
        call.tile(2 * call.chunk + call.block, call.block)
        + call.tile(call.chunk, call.chunk)
        + call.sums_of_rows(),
        call.chunk,
        call.block,
    )
    return heads_first(o)
