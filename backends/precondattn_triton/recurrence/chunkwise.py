"""The recurrence of linear attention and the delta rule in chunks, by Triton kernels.

    U = M β (V − reading ∘ K S)  (additive: U = V),    O = s (reading ∘ Q S + (D ∘ Q Kᵀ) U),
    S ← total ∘ S + (writing ∘ K)ᵀ U

with D and the factors of `chunk_tiles.py` and M of `chunk_inverse.py`. Chunks are prepared all at
once (`delta_rule.py`), states go from chunk to chunk (`chunk_states.py`), and chunks are read all
at once (`chunk_reads.py`). The gradient (`chunkwise_gradient.py`) makes the states anew, goes back
over them, and has the rest of all chunks at once. One token alone has a kernel of its own
(`one_token.py`).

Where values are added, each key channel may have its gates, or each value channel. What tokens read
of each other then comes from `channel_decay.py`, and the factors are rows instead of numbers.

In memory stand, besides inputs, outputs and their gradients, a state of d e numbers in float32 for
each chunk, M and two rows of numbers for each token; in the gradient, twice that and a few rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from precondattn.spec.recurrence import ByTokens, Gradients, Stream
from precondattn_triton.precision import exact, padded_width
from precondattn_triton.recurrence import (
    channel_gates,
    chunk_inverse,
    chunk_reads,
    chunk_states,
    delta_rule,
    gate_sums,
)
from precondattn_triton.recurrence import one_token as recurrent_step
from precondattn_triton.recurrence.channel_pairs import (
    KEY,
    QUERY,
    faded,
    scores_of_queries,
    values_of_pairs,
)
from precondattn_triton.recurrence.chunk_arrays import Call, strides, strides_if
from precondattn_triton.recurrence.chunkwise_gradient import gradients

NO_MOMENTS = dict.fromkeys(
    (
        *("unit", "unit_scale", "unit_valid", "unit_writing", "unit_total"),
        *("moments", "sums", "counts"),
    )
)
"""What a pass over the states is told of moments where none are asked for."""


class Chunkwise:
    """A `Form` of the recurrence (`precondattn.spec.recurrence`), with the outputs times `scale`.

    A stream's queries, keys and values are multiplied in their dtype, and may have fewer heads than
    the state; `decays` says whether there are gates. Gradients are of the queries without the
    scale.
    """

    def __init__(self, precision: str, *, half: bool, decays: bool, scale: float = 1.0) -> None:
        self.precision, self.half, self.decays, self.scale = precision, half, decays, scale

    def forward(self, x: Stream, state: Tensor) -> tuple[Tensor, Tensor]:
        call = self.call(x, state)
        if call.s == 1 and call.t == 1:
            return _step(call, x)
        prepare(call, x)
        final = carry(call)
        return read(call), final

    def vjp(self, x: Stream, state: Tensor, d_o: Tensor, d_final: Tensor) -> Gradients:
        call = self.call(x, state)
        prepare(call, x)
        carry(call)
        return gradients(call, x, d_o, d_final)

    @staticmethod
    def by_tokens(function: ByTokens, *arrays: Any, axis: int = 2) -> tuple[Any, ...]:
        return function(*arrays)

    def read(
        self, streams: Sequence[tuple[Stream, Any]], function: ByTokens, *arrays: Any
    ) -> tuple[tuple[Any, ...], list[Any]]:
        done = [self.forward(stream, state) for stream, state in streams]
        return function(*(o for o, _ in done), *arrays), [final for _, final in done]

    def call(self, x: Stream, state: Tensor) -> Call:
        """The arrays of a call, before anything is launched."""
        return Call(x, state, self.decays, self.scale, self.precision, self.half)


def _step(call: Call, x: Stream) -> tuple[Tensor, Tensor]:
    b, m = call.b, call.m
    final = call.empty(b, m, call.d, call.e)
    o = call.empty(b, 1, m, call.r, call.e, dtype=x.v.dtype)
    gates = None if call.decay == "none" else x.g[:, :, 0]
    beta = None if x.beta is None else x.beta[:, :, 0]
    values = call.values("recurrent_step")
    call.launch(
        recurrent_step.step,
        "recurrent_step",
        (call.step // values, b * m),
        g=gates,
        beta=beta,
        final=final,
        o=o,
        BLOCK=values,
        **strides_if("g", gates, "bmde"),
        **strides_if("beta", beta, "bm"),
    )
    return o.transpose(1, 2), final


def prepare(call: Call, x: Stream) -> None:
    """Gates and their factors; by the delta rule M, Y and W."""
    heads, tokens = call.b * call.m, call.tokens
    for name in ("gates", "reading", "writing", "total", "strength", "inverse", "y", "w", "u"):
        call.known[name] = None
    if call.is_by_channel:
        _prepare_channels(call, x)
    elif call.decay == "head" or x.beta is not None:
        prepare_numbers(call, x)
    call.known |= dict.fromkeys(("scores", "faded_q", "faded_k"))
    if call.decay == "keys":
        call.known["scores"] = scores_of_queries(call)
        call.known["faded_q"] = faded(call, QUERY, "reading")
        call.known["faded_k"] = faded(call, KEY, "writing")
    if x.beta is None:
        return
    call.known["inverse"] = call.empty(heads, tokens, call.chunk)
    call.launch(
        chunk_inverse.invert,
        "chunk_inverse",
        (call.count, heads),
        BLOCK=call.keys("chunk_inverse"),
        LEVELS=call.chunk.bit_length() - 2,
        EXACT=exact(),
    )
    call.known["y"] = call.empty(heads, tokens, call.step)
    call.known["w"] = call.empty(heads, tokens, call.width)
    call.launch(
        delta_rule.prepare,
        "delta_prepare",
        (call.count, heads),
        BLOCK=call.both("delta_prepare"),
    )


def prepare_numbers(call: Call, x: Stream) -> None:
    """Gates of whole heads and their factors, and β."""
    heads = call.b * call.m
    names = ["gates", "reading", "writing"] if call.decay == "head" else []
    names += [] if x.beta is None else ["strength"]
    call.known |= {name: call.empty(heads, call.tokens) for name in names}
    gates = None
    if call.decay == "head":
        gates = x.g[..., 0, 0]
        call.known["total"] = call.empty(heads, call.count)
    call.launch(
        gate_sums.load_factors,
        "gate_sums",
        (call.count, heads),
        g=gates,
        beta=x.beta,
        **strides_if("g", gates, "bms"),
        **strides_if("beta", x.beta, "bms"),
    )


def _prepare_channels(call: Call, x: Stream) -> None:
    heads, gates = call.b * call.m, x.g.flatten(3)
    for name in ("gates", "reading", "writing"):
        call.known[name] = call.empty(heads, call.tokens, call.gate_step)
    call.known["total"] = call.empty(heads, call.count, call.gate_step)
    block = call.gate_block("channel_gates")
    call.launch(
        channel_gates.load_channel_factors,
        "channel_gates",
        (call.count * call.gate_step // block, heads),
        g=gates,
        width=gates.shape[3],
        BLOCK=block,
        **strides("g", gates, "bmsc"),
    )


def carry(call: Call, moments: Mapping[str, Any] | None = None) -> Tensor:
    """The last state, with those in front of every chunk left in the call.

    If there are `moments` of the same keys to be made, they are made in the same pass.
    """
    heads = call.b * call.m
    final = call.empty(call.b, call.m, call.d, call.e)
    call.known["states"] = call.empty(heads, call.count, call.width, call.step)
    if call.known["y"] is not None:
        call.known["u"] = call.empty(heads, call.tokens, call.step)
    name = "chunk_states" if moments is None else "chunk_states_and_moments"
    values = call.values(name)
    call.launch(
        chunk_states.carry_states,
        name,
        (call.step // values, heads),
        final=final,
        BLOCK=values,
        # Every program has a block of the values, and together they have all columns of moments.
        COLUMNS=0 if moments is None else padded_width(-(-call.width * values // call.step)),
        **(NO_MOMENTS if moments is None else moments),
    )
    return final


def read(call: Call) -> Tensor:
    """The outputs (b, m, t, r, e), once there are states."""
    o = call.empty(call.b, call.t, call.m, call.r, call.e, dtype=call.known["v"].dtype)
    values = call.values("chunk_reads")
    call.launch(
        chunk_reads.read,
        "chunk_reads",
        (call.count * call.step // values, call.b * call.m * call.r),
        o=o,
        own_o=values_of_pairs(call) if call.decay == "values" else None,
        KEYS=call.keys("chunk_reads"),
        BLOCK=values,
    )
    return o.transpose(1, 2)
