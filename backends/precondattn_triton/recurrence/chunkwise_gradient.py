"""The gradient of the chunkwise recurrence: launches, in the order of their dependencies.

Given the states before every chunk and the delta rule's M, Y, W and U: first the part of dU from
the outputs of the same chunk, then, backward over the chunks, the gradients of states and of U,
then the remaining gradients for all chunks at once.
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
)
from precondattn_triton.recurrence.channel_pairs import (
    COTANGENT,
    VALUE,
    erase_gate_gradients,
    key_gate_gradients,
    tril_of_products,
    value_gate_gradients,
)
from precondattn_triton.recurrence.chunk_arrays import ChunkCall, strides


def gradients(call: ChunkCall, x: Stream, d_o: Tensor, d_final: Tensor) -> StreamGradients:
    """The gradients of a call whose states have been computed."""
    queries = call.b * call.m * call.r
    call.arguments |= {"d_o": d_o, **strides("o", d_o, "bmtre")}
    names: tuple[str, ...] = (
        "within_q",
        "within_k",
        "within_erase",
        "d_gates",
        "crossing_scores",
        "d_right",
        "d_keys",
        "d_strength",
    )
    names += ("crossing_keys", "read", "written", "erased", "from_keys", "overlap")
    call.arguments |= dict.fromkeys(names)
    if call.decay == "values":
        call.arguments["d_scores"], local, call.arguments["d_gates"] = value_gate_gradients(call)
        call.arguments["local"] = local
    else:
        call.arguments["local"] = _local(call)
    d_initial = _carry_back(call, d_final)
    if call.decay == "keys":
        call.arguments["d_scores"] = tril_of_products(call, COTANGENT, VALUE)
        within = key_gate_gradients(call, call.arguments["d_scores"])
        call.arguments["within_q"], call.arguments["within_k"], call.arguments["d_gates"] = within
    elif call.decay != "values":
        call.arguments["d_scores"] = call.empty(queries, call.tokens, call.chunk)
        if call.decay == "head":
            call.arguments["crossing_scores"] = call.empty(queries, call.tokens)
        call.launch(
            chunk_gradient.d_scores_of,
            "chunk_scores_gradient",
            (call.count, queries),
            BLOCK=call.both("chunk_scores_gradient"),
        )
    d_v = _d_values(call, x)
    if call.decay == "keys" and x.beta is not None:
        pairs = call.arguments["d_keys"]
        call.arguments["within_erase"] = erase_gate_gradients(call, pairs, within[1:])
    d_q = _d_queries(call, x)
    d_erase, d_undecayed = (
        None if keys is None else _d_erase(call, keys) for keys in (x.erase, x.undecayed)
    )
    d_k = _d_keys(call, x)
    d_g, d_beta = _d_numbers(call, x)
    if call.is_by_channel:
        d_g = _d_channel_gates(call, x)
    d_q, d_k = d_q.transpose(1, 2), d_k.transpose(1, 2)
    stream = Stream(d_q, d_k, d_v, d_g, d_beta, d_erase, d_undecayed)
    return StreamGradients(stream, d_initial)


def _of_heads(x: Tensor, call: ChunkCall) -> torch.dtype:
    """The dtype of a gradient per head with a state; shared heads are summed in float32."""
    return x.dtype if x.shape[1] == call.m else torch.float32


def _local(call: ChunkCall) -> Tensor:
    """The part of dU from the outputs of the same chunk (m, T, STEP)."""
    local = call.empty(call.b * call.m, call.tokens, call.step)
    values = call.values("chunk_reads")
    call.launch(
        chunk_reads.read_back,
        "chunk_reads",
        (call.count * call.step // values, call.b * call.m),
        local=local,
        KEYS=call.keys("chunk_reads"),
        BLOCK=values,
    )
    return local


def _carry_back(call: ChunkCall, d_final: Tensor) -> Tensor:
    """The initial state's gradient. The call stores dU, and the state gradient after each chunk."""
    heads = call.b * call.m
    d_initial = call.empty(call.b, call.m, call.d, call.e)
    call.arguments["d_states"] = torch.empty_like(call.arguments["states"])
    call.arguments["d_u"] = torch.empty_like(call.arguments["local"])
    values = call.values("chunk_gradients")
    call.launch(
        chunk_states.carry_gradients,
        "chunk_gradients",
        (call.step // values, heads),
        d_final=d_final.contiguous(),
        d_initial=d_initial,
        BLOCK=values,
    )
    return d_initial


def _d_values(call: ChunkCall, x: Stream) -> Tensor:
    """dV (b, m, s, e); with the delta rule, other results of dU are stored in the call."""
    heads, tokens = call.b * call.m, call.tokens
    if x.beta is None:
        d_v = call.arguments["d_u"].view(call.b, call.m, tokens, call.step)
        return d_v[:, :, : call.s, : call.e]
    call.arguments["d_right"] = call.empty(heads, tokens, call.step)
    call.arguments["d_keys"] = call.empty(heads, tokens, call.chunk)
    call.arguments["d_strength"] = call.empty(heads, tokens)
    if call.decay == "head":
        call.arguments["crossing_keys"] = call.empty(heads, tokens)
    d_v = call.empty(call.b, call.s, call.m, call.e, dtype=_of_heads(x.v, call))
    call.launch(
        delta_rule.d_written,
        "delta_keys",
        (call.count, heads),
        d_v=d_v,
        gates=None if call.decay == "keys" else call.arguments["gates"],
        BLOCK=call.both("delta_keys"),
    )
    return d_v.transpose(1, 2)


def _d_queries(call: ChunkCall, x: Stream) -> Tensor:
    """dQ (b, t, m, r, d)"""
    queries, keys = call.b * call.m * call.r, call.keys("chunk_query_gradient")
    blocks = call.width // keys
    if call.decay == "head":
        call.arguments["read"] = call.empty(queries, blocks, call.tokens)
    if call.decay == "keys":
        call.arguments["read"] = call.empty(queries, call.tokens, call.width)
    d_q = call.empty(call.b, call.t, call.m, call.r, call.d, dtype=_of_heads(x.q, call))
    call.launch(
        chunk_gradient.d_queries,
        "chunk_query_gradient",
        (call.count * blocks, queries),
        d_q=d_q,
        KEYS=keys,
        BLOCK=call.values("chunk_query_gradient"),
    )
    return d_q


def _d_erase(call: ChunkCall, erase: Tensor) -> Tensor:
    """dE (b, m, s, d)"""
    heads, keys = call.b * call.m, call.keys("chunk_key_gradient")
    blocks = call.width // keys
    if call.decay == "keys":
        call.arguments["erased"] = call.empty(heads, call.tokens, call.width)
    call.arguments["from_keys"] = call.empty(heads, blocks, call.tokens)
    d_erase = call.empty(call.b, call.s, call.m, call.d, dtype=_of_heads(erase, call))
    call.launch(
        erase_gradient.d_erase_of,
        "chunk_key_gradient",
        (call.count * blocks, heads),
        reading=call.erasing,
        d_erase=d_erase,
        KEYS=keys,
        BLOCK=call.values("chunk_key_gradient"),
    )
    return d_erase.transpose(1, 2)


def _d_keys(call: ChunkCall, x: Stream) -> Tensor:
    """dK (b, s, m, d), which includes dE if the keys that are erased are K."""
    heads, keys = call.b * call.m, call.keys("chunk_key_gradient")
    blocks = call.width // keys
    if call.decay in ("head", "keys"):
        call.arguments["overlap"] = call.empty(heads, call.count, call.width)
    if call.decay == "head":
        call.arguments["written"] = call.empty(heads, blocks, call.tokens)
    if call.decay == "keys":
        call.arguments["written"] = call.empty(heads, call.tokens, call.width)
    erases = x.beta is not None and x.erase is None and x.undecayed is None
    if erases:
        call.arguments["from_keys"] = call.empty(heads, blocks, call.tokens)
        if call.decay == "keys":
            call.arguments["erased"] = call.empty(heads, call.tokens, call.width)
    d_k = call.empty(call.b, call.s, call.m, call.d, dtype=_of_heads(x.k, call))
    call.launch(
        chunk_gradient.d_keys_of,
        "chunk_key_gradient",
        (call.count * blocks, heads),
        d_k=d_k,
        d_right=call.arguments["d_right"] if erases else None,
        KEYS=keys,
        BLOCK=call.values("chunk_key_gradient"),
    )
    return d_k


def _d_numbers(call: ChunkCall, x: Stream) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the gates, in their own shape, and of β (b, m, s)."""
    heads = call.b * call.m
    d_g = call.empty(heads, call.s) if call.decay == "head" else None
    d_beta = None if x.beta is None else call.empty(heads, call.s)
    if d_g is not None or d_beta is not None:
        call.launch(
            gate_sums.gate_gradient,
            "gate_sums",
            (call.count, heads),
            crossing=call.arguments["crossing_scores"],
            d_g=d_g,
            d_beta=d_beta,
            READ_BLOCKS=call.width // call.keys("chunk_query_gradient"),
            KEY_BLOCKS=call.width // call.keys("chunk_key_gradient"),
        )
    if d_beta is not None:
        d_beta = d_beta.view(call.b, call.m, call.s)
    return torch.zeros_like(x.g) if d_g is None else d_g.view(x.g.shape), d_beta


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
