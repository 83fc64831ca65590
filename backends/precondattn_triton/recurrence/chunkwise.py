"""The chunkwise recurrence of linear attention and the delta rule, in Triton kernels.

    U = M β (V − reading ∘ E S)  (additive: U = V),    O = s (reading ∘ Q S + (D ∘ Q Kᵀ) U),
    S ← total ∘ S + (writing ∘ K)ᵀ U

with D and the factors of `chunk_tiles.py` and M of `chunk_inverse.py`; E are the keys that are
erased, K unless others are given. They may be erased from the state before its decay; reading of
token i is then that of token i − 1. All chunks are prepared at once (`delta_rule.py`), states are
carried from chunk to chunk (`chunk_states.py`), and the outputs of all chunks are computed at once
(`chunk_reads.py`). The gradient (`chunkwise_gradient.py`) recomputes the states, carries their
gradients backward, and computes the rest for all chunks at once. A call with one token has a
separate kernel (`one_token.py`).

Each key channel may have its own gate, or, in an additive recurrence, each value channel. Then
`channel_decay.py` computes the pairs within a chunk, and the factors are rows instead of numbers.

Besides inputs, outputs and their gradients, memory holds a state of d e elements in float32 per
chunk, M and two rows per token; the gradient needs twice that and a few rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from precondattn.kernel_backend.limits import padded_width
from precondattn.spec.recurrence import AllTokens, Stream, StreamGradients
from precondattn_triton.precision import exact
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
    decayed,
    decayed_scores,
    erase_scores,
    outputs_within_chunks,
)
from precondattn_triton.recurrence.chunk_arrays import Argument, ChunkCall, strides, strides_if
from precondattn_triton.recurrence.chunkwise_gradient import gradients

NO_MOMENTS = dict.fromkeys(
    (
        *("unit", "unit_scale", "unit_valid", "unit_writing", "unit_total"),
        *("moments", "sums", "counts"),
    )
)
"""The arguments of a pass over the states that computes no moments."""


class Chunkwise(AllTokens):
    """A `Form` of the recurrence (`precondattn.spec.recurrence`), with outputs times `scale`.

    The queries, keys and values of a stream are multiplied in their dtype, and may have fewer heads
    than the state. `decays` is whether there are gates. Gradients are with respect to the queries
    before scaling.
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

    def vjp(self, x: Stream, state: Tensor, d_o: Tensor, d_final: Tensor) -> StreamGradients:
        call = self.call(x, state)
        prepare(call, x)
        carry(call)
        return gradients(call, x, d_o, d_final)

    def call(self, x: Stream, state: Tensor) -> ChunkCall:
        """The arrays of a call, before any launch."""
        return ChunkCall(x, state, self.decays, self.scale, self.precision, self.half)


def _step(call: ChunkCall, x: Stream) -> tuple[Tensor, Tensor]:
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


def prepare(call: ChunkCall, x: Stream) -> None:
    """Compute the decay factors, and with the delta rule M, Y and W."""
    heads, tokens = call.b * call.m, call.tokens
    names: tuple[str, ...] = ("gates", "reading", "erasing", "writing", "total", "strength")
    names += ("among", "inverse", "y", "w", "u")
    call.arguments |= dict.fromkeys(names)
    if call.decay == "head" or x.beta is not None:
        prepare_numbers(call, x)
    if call.is_by_channel:
        _prepare_channels(call, x)
    call.arguments |= dict.fromkeys(("scores", "decayed_q", "decayed_k"))
    if call.decay == "keys":
        call.arguments["scores"] = decayed_scores(call)
        call.arguments["decayed_q"] = decayed(call, QUERY, "reading")
        call.arguments["decayed_k"] = decayed(call, KEY, "writing")
    if x.beta is None:
        return
    if call.decay == "keys":
        call.arguments["among"] = erase_scores(call)
    call.arguments["inverse"] = call.empty(heads, tokens, call.chunk)
    call.launch(
        chunk_inverse.invert,
        "chunk_inverse",
        (call.count, heads),
        gates=None if call.decay == "keys" else call.arguments["gates"],
        BLOCK=call.keys("chunk_inverse"),
        LEVELS=call.chunk.bit_length() - 2,
        EXACT=exact(),
    )
    call.arguments["y"] = call.empty(heads, tokens, call.step)
    call.arguments["w"] = call.empty(heads, tokens, call.width)
    call.launch(
        delta_rule.prepare,
        "delta_prepare",
        (call.count, heads),
        reading=call.erasing,
        BLOCK=call.both("delta_prepare"),
    )


def prepare_numbers(call: ChunkCall, x: Stream) -> None:
    """Compute the decay factors of gates per head, and load β."""
    heads = call.b * call.m
    names = ["gates", "reading", "writing"] if call.decay == "head" else []
    names += ["erasing"] if call.arguments["UNDECAYED"] else []
    names += [] if x.beta is None else ["strength"]
    call.arguments |= {name: call.empty(heads, call.tokens) for name in names}
    gates = None
    if call.decay == "head":
        gates = x.g[..., 0, 0]
        call.arguments["total"] = call.empty(heads, call.count)
    call.launch(
        gate_sums.load_factors,
        "gate_sums",
        (call.count, heads),
        g=gates,
        beta=x.beta,
        **strides_if("g", gates, "bms"),
        **strides_if("beta", x.beta, "bms"),
    )


def _prepare_channels(call: ChunkCall, x: Stream) -> None:
    heads, gates = call.b * call.m, x.g.flatten(3)
    for name in ("gates", "reading", "writing"):
        call.arguments[name] = call.empty(heads, call.tokens, call.gate_step)
    call.arguments["total"] = call.empty(heads, call.count, call.gate_step)
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


def carry(call: ChunkCall, moments: Mapping[str, Argument] | None = None) -> Tensor:
    """The last state; those before every chunk are stored in the call.

    With `moments`, the moments of the same keys are computed in the same pass.
    """
    heads = call.b * call.m
    final = call.empty(call.b, call.m, call.d, call.e)
    call.arguments["states"] = call.empty(heads, call.count, call.width, call.step)
    if call.arguments["y"] is not None:
        call.arguments["u"] = call.empty(heads, call.tokens, call.step)
    name = "chunk_states" if moments is None else "chunk_states_and_moments"
    values = call.values(name)
    call.launch(
        chunk_states.carry_states,
        name,
        (call.step // values, heads),
        final=final,
        BLOCK=values,
        # The programs of a head divide the columns of the moments among themselves.
        COLUMNS=0 if moments is None else padded_width(-(-call.width * values // call.step)),
        **(NO_MOMENTS if moments is None else moments),
    )
    return final


def read(call: ChunkCall) -> Tensor:
    """The outputs (b, m, t, r, e), after the states have been computed."""
    o = call.empty(call.b, call.t, call.m, call.r, call.e, dtype=call.arguments["v"].dtype)
    values = call.values("chunk_reads")
    call.launch(
        chunk_reads.read,
        "chunk_reads",
        (call.count * call.step // values, call.b * call.m * call.r),
        o=o,
        within_o=outputs_within_chunks(call) if call.decay == "values" else None,
        KEYS=call.keys("chunk_reads"),
        BLOCK=values,
    )
    return o.transpose(1, 2)
