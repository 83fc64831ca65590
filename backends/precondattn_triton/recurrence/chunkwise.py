"""The chunkwise recurrence of linear attention and the delta rule, in Triton kernels.

    U = M β (V − reading ∘ E S)  (additive: U = V),    O = s (reading ∘ Q S + (D ∘ Q Kᵀ) U),
    S ← total ∘ S + (writing ∘ K)ᵀ U

with D and the factors of `chunk_tiles.py` and M of `delta_rule.py`; E are the keys that are
erased, K unless others are given. They may be erased from the state before its decay; reading of
token i is then that of token i − 1. In three launches, all chunks are prepared at once
(`delta_rule.py`; without the delta rule only their decay factors, `decay_factors.py`), states are
carried from chunk to chunk (`chunk_states.py`), and the outputs of all chunks are computed at once
(`chunk_reads.py`). The gradient (`chunkwise_gradient.py`) takes four: it recomputes the first two,
carries the states' gradients backward, and computes those of all inputs at once. A call with one
token has a separate kernel (`one_token.py`).

Each key channel may have its own gate, or, in an additive recurrence, each value channel. Then
`channel_decay.py` computes the pairs within a chunk, and the factors are rows instead of numbers.

Besides inputs, outputs and their gradients, memory holds a state of d e elements per chunk, and
with the delta rule three rows per token (Y, W, U); the gradient has twice as many states, six rows,
and a row of C numbers per query. They are in float32, and in bfloat16 where inputs are, except in
precise kernels.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from precondattn.frame import Frame
from precondattn.kernel_backend.limits import padded_width
from precondattn.kernel_backend.precise import is_precise
from precondattn.kernel_backend.stateful import StatefulKernels, decays, scale_in_form
from precondattn.spec.recurrence import AllTokens, Stream, StreamGradients
from precondattn.spec.stateful import Stateful
from precondattn_triton.precision import exact, is_half, product_precision
from precondattn_triton.recurrence import (
    chunk_reads,
    chunk_states,
    decay_factors,
    delta_rule,
)
from precondattn_triton.recurrence import one_token as recurrent_step
from precondattn_triton.recurrence.channel_pairs import outputs_within_chunks, prepare_keys
from precondattn_triton.recurrence.chunk_arrays import ChunkCall, shared_heads
from precondattn_triton.recurrence.chunkwise_gradient import gradients
from precondattn_triton.recurrence.moments import Moments


class Chunkwise(AllTokens):
    """A `Form` of the recurrence (`precondattn.spec.recurrence`), with outputs times `scale`.

    The queries, keys and values of a stream are multiplied in their dtype, and may have fewer heads
    than the state. A state, or its gradient, is None for 0, and gates may have any dtype. `decays`
    is whether there are gates. Gradients are with respect to the queries before scaling.
    """

    def __init__(self, precision: str, *, half: bool, decays: bool, scale: float = 1.0) -> None:
        self.precision, self.half, self.decays, self.scale = precision, half, decays, scale

    def forward(self, x: Stream, state: Tensor | None) -> tuple[Tensor, Tensor]:
        call = self.call(x, state)
        if call.s == 1 and call.t == 1:
            return _step(call, x)
        prepare(call, x)
        final = carry(call)
        return read_states(call), final

    def vjp(
        self, x: Stream, state: Tensor | None, d_o: Tensor, d_final: Tensor | None
    ) -> StreamGradients:
        call = self.call(x, state)
        prepare(call, x, d_o)
        carry(call)
        return gradients(call, x, d_final)

    def call(self, x: Stream, state: Tensor | None) -> ChunkCall:
        """The arrays of a call, before any launch."""
        return ChunkCall(x, state, self.decays, self.scale, self.precision, self.half)


def _step(call: ChunkCall, x: Stream) -> tuple[Tensor, Tensor]:
    b, m = call.b, call.m
    final = call.empty(b, m, call.d, call.e)
    o = call.empty(b, 1, m, call.r, call.e, dtype=x.v.dtype)
    gates = None if call.decay == "none" else x.g
    values = call.values("recurrent_step")
    call.launch(
        recurrent_step.step,
        "recurrent_step",
        (call.step // values, b * m),
        g=shared_heads(gates),
        beta=shared_heads(x.beta),
        final=final,
        o=o,
        BLOCK=values,
    )
    return o.transpose(1, 2), final


def prepare(call: ChunkCall, x: Stream, d_o: Tensor | None = None) -> None:
    """Compute what the states need: the decay factors, and with the delta rule Y and W.

    With the outputs' gradient d_o (b, m, t, r, e) it also computes what their gradients need.
    """
    names: tuple[str, ...] = ("gates", "reading", "erasing", "writing", "total", "strength")
    names += ("erase_scores", "y", "w", "u", "z", "local", "eraser")
    names += ("scores", "decayed_q", "decayed_k")
    call.arguments |= dict.fromkeys(names)
    call.arguments["d_o"] = shared_heads(d_o)
    if call.decay == "keys":
        erases = x.beta is not None
        factors = erases or d_o is not None
        prepare_keys(call, x.g.flatten(3), factors=factors, erases=erases)
    elif call.decay == "values":
        _prepare_values(call, x)
    elif call.decay == "head" and x.beta is None:
        prepare_numbers(call, x)
    if x.beta is not None:
        _prepare_delta_rule(call, x)


def _prepare_delta_rule(call: ChunkCall, x: Stream) -> None:
    """Y and W, and Z and Mᵀ A if there is a gradient of the outputs; factors of gates per head."""
    call.arguments["strength"] = call.empty(call.b * call.m, call.tokens)
    rows = {"w": call.width, "y": call.step}
    if call.arguments["d_o"] is not None:
        rows |= {"z": call.width, "local": call.step}
    if call.decay == "keys":
        rows |= {"eraser": call.width} if "z" in rows else {}
    call.arguments |= {name: call.factor_rows(width) for name, width in rows.items()}
    gates = _allocate_numbers(call, x) if call.decay == "head" else None
    call.launch(
        delta_rule.prepare,
        "delta_prepare",
        (call.count, call.b * call.m),
        g=shared_heads(gates),
        beta=shared_heads(x.beta),
        BLOCK=call.both("delta_prepare"),
        LEVELS=call.chunk.bit_length() - 2,
        EXACT=exact(),
    )


def prepare_numbers(call: ChunkCall, x: Stream) -> None:
    """Compute the decay factors of gates per head."""
    gates = _allocate_numbers(call, x)
    call.launch(
        decay_factors.load_factors,
        "gate_sums",
        (call.count, call.b * call.m),
        g=shared_heads(gates),
    )


def _allocate_numbers(call: ChunkCall, x: Stream) -> Tensor:
    """The gates per head (b, m, s); their factors are allocated."""
    heads = call.b * call.m
    names = ["gates", "reading", "writing"]
    names += ["erasing"] if call.arguments["UNDECAYED"] else []
    call.arguments |= {name: call.empty(heads, call.tokens) for name in names}
    call.arguments["total"] = call.empty(heads, call.count)
    return x.g[..., 0, 0]


def _prepare_values(call: ChunkCall, x: Stream) -> None:
    heads, gates = call.b * call.m, x.g.flatten(3)
    call.arguments["g"] = shared_heads(gates)
    for name in ("reading", "writing"):
        call.arguments[name] = call.empty(heads, call.tokens, call.gate_step)
    call.arguments["total"] = call.empty(heads, call.count, call.gate_step)
    block = call.gate_block("channel_gates")
    call.launch(
        decay_factors.load_channel_factors,
        "channel_gates",
        (call.count * call.gate_step // block, heads),
        width=gates.shape[3],
        BLOCK=block,
    )


def carry(call: ChunkCall, moments: Moments | None = None) -> Tensor:
    """The last state; those before every chunk are stored in the call.

    With `moments`, the moments of the same keys are computed in the same pass.
    """
    heads = call.b * call.m
    final = call.empty(call.b, call.m, call.d, call.e)
    shape = heads, call.count, call.width, call.step
    call.arguments["states"] = call.empty(*shape, dtype=call.factors)
    if call.arguments["y"] is not None:
        call.arguments["u"] = call.factor_rows(call.step)
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
        moments=moments,
    )
    return final


def read_states(call: ChunkCall) -> Tensor:
    """The outputs (b, m, t, r, e), after the states have been computed."""
    o = call.empty(call.b, call.t, call.m, call.r, call.e, dtype=call.arguments["v"].array.dtype)
    values = call.values("chunk_reads")
    call.launch(
        chunk_reads.read_states,
        "chunk_reads",
        (call.count * call.step // values, call.b * call.m * call.r),
        o=o,
        within_o=outputs_within_chunks(call) if call.decay == "values" else None,
        KEYS=call.keys("chunk_reads"),
        BLOCK=values,
    )
    return o.transpose(1, 2)


def form_of(leaf: Stateful, x: Mapping[str, Tensor], frame: Frame) -> Chunkwise:
    """The recurrence in chunks for a leaf and its inputs."""
    dtype = x["k" if "k" in x else "v"].dtype
    # The outputs are divided by a sum of weights that may cancel.
    declared = leaf.declares
    divides = declared is not None and declared.normaliser == "sum" and dtype != torch.float32
    return Chunkwise(
        exact() if divides else product_precision(dtype),
        half=is_half(dtype),
        decays=decays(leaf, frame),
        scale=scale_in_form(leaf, x),
    )


WIDEST_OF_CHANNELS = 512
"""The largest width of keys with a gate each, in bfloat16. A program that carries a state reads all
channels of a chunk's keys: more than 256 in float32, as also for float16, do not fit registers."""


class RecurrenceKernels(StatefulKernels):
    """The linear family (GLA, GatedDelta, KDA …), GSA, CCQ's query, and the key that ATK writes."""

    widens_gates, has_zero_state = False, True

    def widest_keys(self, leaf: Stateful, dtype: str) -> int:
        declared = leaf.declares
        is_wide = declared is not None and declared.gate == "channel"
        # Factors of 32 bits would not fit.
        if is_wide and dtype == "bfloat16" and not is_precise():
            return WIDEST_OF_CHANNELS
        return super().widest_keys(leaf, dtype)

    def form(self, leaf: Stateful, x: Mapping[str, Tensor], frame: Frame) -> Chunkwise:
        return form_of(leaf, x, frame)
