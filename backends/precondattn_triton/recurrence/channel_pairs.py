"""Pairs of tokens within a chunk, with a gate per channel: launches of `channel_decay.py`.

With A = s tril(Q Kᵀ) and F of `channel_decay.py`,

    gates of key channels:    scores = s dF(·, Q, K)/dA,    dQ, dK, dg from F(s tril(dO Uᵀ), Q, K),
                              with the delta rule  L = stril(dF(·, E, K)/dA),  plus F(dL, E, K),
    gates of value channels:  O = dF(A, ·, V)/dx,    d scores = s dF(·, dO, V)/dA,
                              dV, dg from F(A, dO, V).
"""

from __future__ import annotations

import torch
from torch import Tensor

from precondattn.kernel_backend.precise import is_precise
from precondattn_triton.precision import exact
from precondattn_triton.recurrence import channel_decay, chunk_reads
from precondattn_triton.recurrence.chunk_arrays import Arguments, ChunkCall, shared_heads

QUERY, COTANGENT, KEY, VALUE = "q", "d_o", "k", "v"
"""The names of arrays."""


def _pair(call: ChunkCall, x: str | None, y: str) -> Arguments:
    """The arguments of the kernels of `channel_decay.py` for an x and a y."""
    return {
        "x": None if x is None else call.arguments[x],
        "y": call.arguments[y],
        "width": call.d if y is KEY else call.e,
        "LEVELS": call.chunk.bit_length() - 1,
        "SPLIT": _is_rounding(call),
        "ROUNDED": _rounds_rows(call),
        "NARROW": call.factors == torch.bfloat16,
        "EXACT": exact(),
    }


def _is_rounding(call: ChunkCall) -> bool:
    """Whether a product may round its factors to 16 bits."""
    return call.half and call.arguments["PRECISION"] != exact() and not is_precise()


def _rounds_rows(call: ChunkCall) -> bool:
    """Whether decayed rows are rounded to the 16 bits of all rows: a decay makes none larger."""
    rows = [call.arguments[name] for name in ("q", "k", "v", "erase")]
    dtypes = {heads.array.dtype for heads in rows if heads is not None}
    return _is_rounding(call) and dtypes in ({torch.bfloat16}, {torch.float16})


def _scores_name(call: ChunkCall) -> str:
    """The configuration of `channel_scores`: rows in float32, or of three kinds, need registers."""
    is_small = _rounds_rows(call) and call.arguments["erase"] is None
    return "channel_scores" if is_small else "channel_scores_in_full"


def prepare_keys(call: ChunkCall, gates: Tensor, *, factors: bool, erases: bool) -> None:
    """All that a chunk needs from gates (b, m, s, w) of key channels, in one launch.

    The call gets `scores` (m r, T, C), s tril(D ∘ Q Kᵀ); `decayed_q` (m r, T, w), reading ∘ Q;
    `decayed_k` (m, T, w), writing ∘ K, and `total` (m, chunks, w). With `factors`, it gets
    `reading` and `writing` (m, T, w); with `erases`, `erase_scores` (m, T, C), stril(D ∘ E Kᵀ). All
    are factors of products, and in the call's dtype of factors, but `total` and `erase_scores` in
    float32.
    """
    call.arguments["g"] = shared_heads(gates)
    heads, queries = call.b * call.m, call.b * call.m * call.r
    of_tokens = call.tokens, call.gate_step
    result = {
        "scores": call.empty(queries, call.tokens, call.chunk, dtype=call.factors),
        "decayed_q": call.empty(queries, *of_tokens, dtype=call.factors),
        "decayed_k": call.factor_rows(call.gate_step),
        "total": call.empty(heads, call.count, call.gate_step),
    }
    if factors:
        result |= {name: call.factor_rows(call.gate_step) for name in ("reading", "writing")}
    if erases:
        result["erase_scores"] = call.empty(heads, call.tokens, call.chunk)
    call.arguments |= result
    name = _scores_name(call)
    call.launch(
        channel_decay.channel_scores,
        name,
        (call.count, queries),
        **_pair(call, QUERY, KEY),
        decayed_x=result["decayed_q"],
        decayed_y=result["decayed_k"],
        BLOCK=call.gate_block(name),
    )


def _gradient(
    call: ChunkCall, x: str | None, y: str, pairs: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The derivatives of F: dx (m r, T, w), and, with x, dy, dg and dE (m, T, w).

    With the delta rule, `d_keys` of the call is the A of the keys that are erased. dE is None if
    these are y. dg is in float32, the others in the call's dtype of factors: they are parts of
    gradients in the dtype of the inputs.
    """
    heads, shape = call.b * call.m, (call.tokens, call.gate_step)
    erase = call.arguments["erase"] if y is KEY else None
    d_x = call.empty(pairs.shape[0], *shape, dtype=call.factors)
    d_y = None if x is None else call.factor_rows(call.gate_step)
    d_gates = None if x is None else call.empty(heads, *shape)
    d_erase = None if erase is None else call.factor_rows(call.gate_step)
    erased_pairs = call.arguments["d_keys"] if y is KEY else None
    name = "channel_gradient"
    if erased_pairs is not None:
        is_narrow = call.factors == torch.bfloat16
        name = "channel_erase_gradient" if is_narrow else "channel_erase_gradient_in_full"
    block = call.gate_block(name)
    call.launch(
        channel_decay.channel_gradient,
        name,
        (call.count * call.gate_step // block, heads),
        **_pair(call, x, y),
        pairs=pairs,
        erased_pairs=erased_pairs,
        d_x=d_x,
        d_y=d_y,
        d_erase=d_erase,
        d_gates=d_gates,
        BLOCK=block,
    )
    return d_x, d_y, d_gates, d_erase


def tril_of_products(call: ChunkCall, x: str, y: str) -> Tensor:
    """s tril(x yᵀ) (m r, T, C), with U for V by the delta rule."""
    queries = call.b * call.m * call.r
    products = call.empty(queries, call.tokens, call.chunk, dtype=call.factors)
    call.launch(
        chunk_reads.d_scores_of,
        "chunk_scores_gradient",
        (call.count, queries),
        d_o=call.arguments[x],
        v=call.arguments[y],
        sizes=call.arguments["sizes"]._replace(e=call.d if y is KEY else call.e),
        STEP=call.width if y is KEY else call.step,
        u=None if y is KEY else call.arguments["u"],
        d_scores=products,
        BLOCK=call.both("chunk_scores_gradient"),
    )
    return products


def outputs_within_chunks(call: ChunkCall) -> Tensor:
    """The part of O within chunks (m r, T, w), with gates of value channels."""
    scores = tril_of_products(call, QUERY, KEY)
    return _gradient(call, None, VALUE, scores)[0]


def key_gate_gradients(call: ChunkCall) -> None:
    """Add the gradients within chunks to the call, with gates of key channels.

    `within_q` (m r, T, w), `within_k`, `d_gates` and, if other keys are erased than K,
    `within_erase` (m, T, w), from `d_scores`, and with the delta rule `d_keys`.
    """
    names = "within_q", "within_k", "d_gates", "within_erase"
    results = _gradient(call, QUERY, KEY, call.arguments["d_scores"])
    call.arguments |= dict(zip(names, results, strict=True))


def value_gate_gradients(call: ChunkCall) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradient of scores (m r, T, C), dV and dg (m, T, w), with gates of value channels."""
    scores = tril_of_products(call, QUERY, KEY)
    _, d_v, d_gates, _ = _gradient(call, COTANGENT, VALUE, scores)
    queries = call.b * call.m * call.r
    d_scores = call.empty(queries, call.tokens, call.chunk)
    unused = ("erase", "erase_scores", "decayed_x", "decayed_y", "reading", "writing", "total")
    name = _scores_name(call)
    call.launch(
        channel_decay.channel_scores,
        name,
        (call.count, queries),
        **_pair(call, COTANGENT, VALUE) | dict.fromkeys(unused),
        scores=d_scores,
        BLOCK=call.gate_block(name),
    )
    return d_scores, d_v, d_gates
