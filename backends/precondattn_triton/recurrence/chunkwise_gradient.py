"""The gradient of the chunkwise recurrence: launches, in the order of their dependencies.

The states before every chunk have been computed, and the delta rule's Y, W, U, Z and Mᵀ A. Backward
over the chunks, the gradients of the states, and with the delta rule X, are computed
(`chunk_states.py`); then the gradients of all inputs, for all chunks at once (`input_gradient.py`).

With a gate per channel, the pairs within a chunk are computed by `channel_decay.py`, before the
gradients of all inputs. The gradient of the gates comes last (`decay_factors.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from precondattn.spec.recurrence import Stream, StreamGradients
from precondattn_triton.recurrence import (
    chunk_reads,
    chunk_states,
    decay_factors,
    delta_rule,
    input_gradient,
)
from precondattn_triton.recurrence.channel_pairs import (
    COTANGENT,
    VALUE,
    key_gate_gradients,
    tril_of_products,
    value_gate_gradients,
)
from precondattn_triton.recurrence.chunk_arrays import Arguments, ChunkCall

OF_CHANNELS = (
    *("within_q", "within_k", "within_erase", "d_scores", "d_gates", "d_keys", "d_strength"),
    *("query_products", "key_products", "erase_products", "overlap", "d_u"),
)
"""The arguments that only a gate per channel has."""

WIDEST_EXACT = 32
"""The most key channels in a tile of `d_inputs` if its factors are in float32: 64 would spill."""


def gradients(call: ChunkCall, x: Stream, d_final: Tensor | None) -> StreamGradients:
    """The gradients of a call that is prepared for them, and whose states have been computed."""
    call.arguments |= dict.fromkeys(OF_CHANNELS)
    if not call.is_by_channel:
        d_initial = _carry_back(call, d_final)
        return StreamGradients(_d_inputs(call, x, None), d_initial)
    if call.decay == "values":
        call.arguments["d_scores"], local, call.arguments["d_gates"] = value_gate_gradients(call)
        call.arguments["local"] = local
    elif x.beta is None:
        call.arguments["local"] = _local(call)
    if x.beta is None:
        call.arguments["d_u"] = call.empty(call.b * call.m, call.tokens, call.step)
    d_initial = _carry_back(call, d_final)
    if call.decay == "keys":
        call.arguments["d_scores"] = tril_of_products(call, COTANGENT, VALUE)
    d_v = _d_values(call, x)
    if call.decay == "keys":
        key_gate_gradients(call)
    return StreamGradients(_d_inputs(call, x, d_v), d_initial)


def _d_inputs(call: ChunkCall, x: Stream, d_v: Tensor | None) -> Stream:
    """The gradients of the inputs. With a gate per channel, dV (b, m, s, e) has been computed."""
    b, m, s, heads = call.b, call.m, call.s, call.b * call.m
    erase = x.erase if x.undecayed is None else x.undecayed
    d_q = call.empty(b, call.t, m, call.r, call.d, dtype=_of_heads(x.q, call))
    d_k = call.empty(b, s, m, call.d, dtype=_of_heads(x.k, call))
    d_erase, d_beta, d_g = None, None, None
    if erase is not None:
        d_erase = call.empty(b, s, m, call.d, dtype=_of_heads(erase, call))
    if x.beta is not None:
        d_beta = call.empty(heads, s)
    if call.decay == "head":
        d_g = call.empty(heads, s)
    arguments: Arguments = {"erasing": call.erasing, "d_v": None}
    if d_v is None:
        d_v = call.empty(b, s, m, call.e, dtype=_of_heads(x.v, call))
        scores = call.empty(heads * call.r, call.tokens, call.chunk, dtype=call.factors)
        arguments |= {"d_v": d_v, "d_scores": scores}
        d_v = d_v.transpose(1, 2)
    if call.decay == "keys":
        call.arguments["query_products"] = call.empty(heads * call.r, call.tokens, call.width)
        call.arguments["key_products"] = call.empty(heads, call.tokens, call.width)
        call.arguments["overlap"] = call.empty(heads, call.count, call.width)
        if x.beta is not None:
            call.arguments["erase_products"] = call.empty(heads, call.tokens, call.width)
    name = "channel_input_gradient" if call.is_by_channel else "chunk_input_gradient"
    keys = call.keys(name)
    call.launch(
        input_gradient.d_inputs,
        name,
        (call.count, heads),
        **arguments,
        d_q=d_q,
        d_k=d_k,
        d_erase=d_erase,
        d_g=d_g,
        d_beta=d_beta,
        KEYS=keys if call.factors == torch.bfloat16 else min(keys, WIDEST_EXACT),
        BLOCK=call.values(name),
    )
    if call.is_by_channel:
        d_g = _d_channel_gates(call, x)
    d_erase = None if d_erase is None else d_erase.transpose(1, 2)
    return Stream(
        d_q.transpose(1, 2),
        d_k.transpose(1, 2),
        d_v,
        torch.zeros_like(x.g) if d_g is None else d_g.view(x.g.shape),
        None if d_beta is None else d_beta.view(b, m, s),
        d_erase if x.undecayed is None else None,
        None if x.undecayed is None else d_erase,
    )


def _of_heads(x: Tensor, call: ChunkCall) -> torch.dtype:
    """The dtype of a gradient per head with a state; shared heads are summed in float32."""
    return x.dtype if x.shape[1] == call.m else torch.float32


def _local(call: ChunkCall) -> Tensor:
    """The part of dU from the outputs of the same chunk (m, T, STEP)."""
    local = call.factor_rows(call.step)
    values = call.values("chunk_reads")
    call.launch(
        chunk_reads.read_back,
        "chunk_reads",
        (call.count * call.step // values, call.b * call.m),
        local=local,
        BLOCK=values,
    )
    return local


def _carry_back(call: ChunkCall, d_final: Tensor | None) -> Tensor:
    """The initial state's gradient. The call stores X, and the state gradient after each chunk."""
    heads = call.b * call.m
    d_initial = call.empty(call.b, call.m, call.d, call.e)
    call.arguments["d_states"] = torch.empty_like(call.arguments["states"])
    is_delta = call.arguments["z"] is not None
    call.arguments["right"] = call.factor_rows(call.step) if is_delta else None
    values = call.values("chunk_gradients")
    call.launch(
        chunk_states.carry_gradients,
        "chunk_gradients",
        (call.step // values, heads),
        erasing=call.erasing,
        d_final=None if d_final is None else d_final.contiguous(),
        d_initial=d_initial,
        BLOCK=values,
    )
    return d_initial


def _d_values(call: ChunkCall, x: Stream) -> Tensor:
    """dV (b, m, s, e); with the delta rule, dL and a part of dβ are stored in the call."""
    heads, tokens = call.b * call.m, call.tokens
    if x.beta is None:
        d_v = call.arguments["d_u"].view(call.b, call.m, tokens, call.step)
        return d_v[:, :, : call.s, : call.e]
    call.arguments["d_keys"] = call.factor_rows(call.chunk)
    call.arguments["d_strength"] = call.empty(heads, tokens)
    d_v = call.empty(call.b, call.s, call.m, call.e, dtype=_of_heads(x.v, call))
    call.launch(
        delta_rule.d_written,
        "delta_keys",
        (call.count, heads),
        d_v=d_v,
        BLOCK=call.values("delta_keys"),
    )
    return d_v.transpose(1, 2)


def _d_channel_gates(call: ChunkCall, x: Stream) -> Tensor:
    """The gradient (m, s, w) of a gate per channel."""
    if call.decay == "values":
        heads, values = call.b * call.m, call.values("value_sums")
        call.arguments["query_products"] = call.empty(heads * call.r, call.tokens, call.step)
        call.arguments["key_products"] = call.empty(heads, call.tokens, call.step)
        call.arguments["overlap"] = call.empty(heads, call.count, call.step)
        call.launch(
            decay_factors.sums_of_values,
            "value_sums",
            (call.count * call.step // values, heads),
            KEYS=call.keys("value_sums"),
            BLOCK=values,
        )
    width = x.g.flatten(3).shape[3]
    d_g = call.empty(call.b * call.m, call.s, width)
    block = call.gate_block("channel_gates")
    call.launch(
        decay_factors.channel_gate_gradient,
        "channel_gates",
        (call.count * call.gate_step // block, call.b * call.m),
        d_g=d_g,
        width=width,
        BLOCK=block,
    )
    return d_g
