"""The gradient of the chunkwise recurrence: launches, in the order of their dependencies.

The states before every chunk have been computed, and the delta rule's Y, W, U, Z and Mᵀ A. Backward
over the chunks, the gradients of the states, and with the delta rule X, are computed
(`chunk_states.py`); then the gradients of all inputs, for all chunks at once (`input_gradient.py`).

With a gate per channel, the pairs within a chunk are computed by `channel_decay.py`, and the rest
by several kernels: first the part of dU from the outputs of the same chunk, at last dQ, dK and dg.
"""

from __future__ import annotations

import torch
from torch import Tensor

from precondattn.spec.recurrence import Stream, StreamGradients
from precondattn_triton.recurrence import (
    channel_gates,
    chunk_gradient,
    chunk_reads,
    chunk_states,
    delta_rule,
    erase_gradient,
    gate_sums,
    input_gradient,
)
from precondattn_triton.recurrence.channel_pairs import (
    COTANGENT,
    VALUE,
    key_gate_gradients,
    tril_of_products,
    value_gate_gradients,
)
from precondattn_triton.recurrence.chunk_arrays import ChunkCall

WIDEST_EXACT = 32
"""The most key channels in a tile of `d_inputs` if its factors are in float32: 64 would spill."""


def gradients(call: ChunkCall, x: Stream, d_final: Tensor | None) -> StreamGradients:
    """The gradients of a call that is prepared for them, and whose states have been computed."""
    if call.is_by_channel:
        return _by_channel(call, x, d_final)
    call.arguments["d_u"] = None
    d_initial = _carry_back(call, d_final)
    return StreamGradients(_d_inputs(call, x), d_initial)


def _d_inputs(call: ChunkCall, x: Stream) -> Stream:
    """The gradients of the inputs, with one gate per head or none."""
    b, m, s, heads = call.b, call.m, call.s, call.b * call.m
    erase = x.erase if x.undecayed is None else x.undecayed
    d_q = call.empty(b, call.t, m, call.r, call.d, dtype=_of_heads(x.q, call))
    d_k = call.empty(b, s, m, call.d, dtype=_of_heads(x.k, call))
    d_v = call.empty(b, s, m, call.e, dtype=_of_heads(x.v, call))
    d_erase, d_beta, d_g = None, None, None
    keys = call.keys("chunk_input_gradient")
    if erase is not None:
        d_erase = call.empty(b, s, m, call.d, dtype=_of_heads(erase, call))
    if x.beta is not None:
        d_beta = call.empty(heads, s)
    if call.decay == "head":
        d_g = call.empty(heads, s)
    call.launch(
        input_gradient.d_inputs,
        "chunk_input_gradient",
        (call.count, heads),
        erasing=call.erasing,
        d_scores=call.empty(heads * call.r, call.tokens, call.chunk, dtype=call.factors),
        d_q=d_q,
        d_k=d_k,
        d_v=d_v,
        d_erase=d_erase,
        d_g=d_g,
        d_beta=d_beta,
        KEYS=keys if call.factors == torch.bfloat16 else min(keys, WIDEST_EXACT),
        BLOCK=call.values("chunk_input_gradient"),
    )
    d_erase = None if d_erase is None else d_erase.transpose(1, 2)
    return Stream(
        d_q.transpose(1, 2),
        d_k.transpose(1, 2),
        d_v.transpose(1, 2),
        torch.zeros_like(x.g) if d_g is None else d_g.view(x.g.shape),
        None if d_beta is None else d_beta.view(b, m, s),
        d_erase if x.undecayed is None else None,
        None if x.undecayed is None else d_erase,
    )


def _by_channel(call: ChunkCall, x: Stream, d_final: Tensor | None) -> StreamGradients:
    """The gradients of a call with a gate per channel."""
    names: tuple[str, ...] = ("within_q", "within_k", "within_erase", "d_gates", "d_keys", "right")
    names += ("d_strength", "read", "written", "erased", "from_keys", "overlap", "d_u")
    call.arguments |= dict.fromkeys(names)
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
    d_q = _d_queries(call, x)
    d_erase = None if x.erase is None else _d_erase(call, x.erase)
    d_k = _d_keys(call, x)
    d_beta = None if x.beta is None else _d_strength(call)
    d_g = _d_channel_gates(call, x)
    d_q, d_k = d_q.transpose(1, 2), d_k.transpose(1, 2)
    return StreamGradients(Stream(d_q, d_k, d_v, d_g, d_beta, d_erase), d_initial)


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


def _d_queries(call: ChunkCall, x: Stream) -> Tensor:
    """dQ (b, t, m, r, d)"""
    queries, keys = call.b * call.m * call.r, call.keys("chunk_query_gradient")
    if call.decay == "keys":
        call.arguments["read"] = call.empty(queries, call.tokens, call.width)
    d_q = call.empty(call.b, call.t, call.m, call.r, call.d, dtype=_of_heads(x.q, call))
    call.launch(
        chunk_gradient.d_queries,
        "chunk_query_gradient",
        (call.count * call.width // keys, queries),
        d_q=d_q,
        KEYS=keys,
        BLOCK=call.values("chunk_query_gradient"),
    )
    return d_q


def _d_erase(call: ChunkCall, erase: Tensor) -> Tensor:
    """dE (b, m, s, d)"""
    heads, keys = call.b * call.m, call.keys("chunk_key_gradient")
    blocks = call.width // keys
    call.arguments["erased"] = call.empty(heads, call.tokens, call.width)
    call.arguments["from_keys"] = call.empty(heads, blocks, call.tokens)
    d_erase = call.empty(call.b, call.s, call.m, call.d, dtype=_of_heads(erase, call))
    call.launch(
        erase_gradient.d_erase_of,
        "chunk_key_gradient",
        (call.count * blocks, heads),
        d_erase=d_erase,
        KEYS=keys,
        BLOCK=call.values("chunk_key_gradient"),
    )
    return d_erase.transpose(1, 2)


def _d_keys(call: ChunkCall, x: Stream) -> Tensor:
    """dK (b, s, m, d), which includes dE if the keys that are erased are K."""
    heads, keys = call.b * call.m, call.keys("chunk_key_gradient")
    blocks = call.width // keys
    if call.decay == "keys":
        call.arguments["overlap"] = call.empty(heads, call.count, call.width)
        call.arguments["written"] = call.empty(heads, call.tokens, call.width)
    erases = x.beta is not None and x.erase is None
    if erases:
        call.arguments["from_keys"] = call.empty(heads, blocks, call.tokens)
        call.arguments["erased"] = call.empty(heads, call.tokens, call.width)
    d_k = call.empty(call.b, call.s, call.m, call.d, dtype=_of_heads(x.k, call))
    call.launch(
        chunk_gradient.d_keys_of,
        "chunk_key_gradient",
        (call.count * blocks, heads),
        d_k=d_k,
        right=call.arguments["right"] if erases else None,
        KEYS=keys,
        BLOCK=call.values("chunk_key_gradient"),
    )
    return d_k


def _d_strength(call: ChunkCall) -> Tensor:
    """dβ (b, m, s)"""
    d_beta = call.empty(call.b * call.m, call.s)
    call.launch(
        gate_sums.strength_gradient,
        "gate_sums",
        (call.count, call.b * call.m),
        d_beta=d_beta,
        KEY_BLOCKS=call.width // call.keys("chunk_key_gradient"),
    )
    return d_beta.view(call.b, call.m, call.s)


def _d_channel_gates(call: ChunkCall, x: Stream) -> Tensor:
    """The gradient of the gates, in their own shape."""
    if call.decay == "values":
        heads, values = call.b * call.m, call.values("value_sums")
        call.arguments["read"] = call.empty(heads * call.r, call.tokens, call.step)
        call.arguments["written"] = call.empty(heads, call.tokens, call.step)
        call.arguments["overlap"] = call.empty(heads, call.count, call.step)
        call.launch(
            channel_gates.sums_of_values,
            "value_sums",
            (call.count * call.step // values, heads),
            KEYS=call.keys("value_sums"),
            BLOCK=values,
        )
    width = x.g.flatten(3).shape[3]
    d_g = call.empty(call.b * call.m, call.s, width)
    block = call.gate_block("channel_gates")
    call.launch(
        channel_gates.channel_gate_gradient,
        "channel_gates",
        (call.count * call.gate_step // block, call.b * call.m),
        d_g=d_g,
        width=width,
        BLOCK=block,
    )
    return d_g.view(x.g.shape)
