"""Pairs of tokens within a chunk, with a gate per channel: launches of `channel_decay.py`.

With A = s tril(Q Kᵀ) and F of `channel_decay.py`,

    gates of key channels:    scores = s dF(·, Q, K)/dA,    dQ, dK, dg from F(s tril(dO Uᵀ), Q, K),
                              with the delta rule  L = stril(dF(·, E, K)/dA),  and F(dL, E, K),
    gates of value channels:  O = dF(A, ·, V)/dx,    d scores = s dF(·, dO, V)/dA,
                              dV, dg from F(A, dO, V).
"""

from __future__ import annotations

from torch import Tensor

from precondattn_triton.recurrence import channel_decay, channel_gates, chunk_gradient
from precondattn_triton.recurrence.chunk_arrays import Argument, Arguments, ChunkCall, strides_if

QUERY, COTANGENT = ("q", "bmtrd"), ("d_o", "bmtre")
KEY, VALUE = ("k", "bmsd"), ("v", "bmse")
ERASE = ("erase", "bmsd")


def _as(call: ChunkCall, name: str, axes: str, other: str, other_axes: str) -> Arguments:
    """The arguments of an array of the call, under another name."""
    prefix, other_prefix = name.removeprefix("d_"), other.removeprefix("d_")
    arguments = {other: call.arguments[name]}
    for axis, other_axis in zip(axes, other_axes, strict=True):
        arguments[f"{other_prefix}_{other_axis}"] = call.arguments[f"{prefix}_{axis}"]
    group = f"{prefix}_group"
    return arguments | (
        {f"{other_prefix}_group": call.arguments[group]} if group in call.arguments else {}
    )


def _pair(call: ChunkCall, x: tuple[str, str] | None, y: tuple[str, str]) -> Arguments:
    arguments: Arguments = {"x_group": 1, "width": call.arguments["d" if y is KEY else "e"]}
    if x is None:
        arguments |= {"x": None} | strides_if("x", None, "bmtrc")
    elif x in (KEY, ERASE):
        # One row per token, of all tokens.
        arguments |= _as(call, *x, "x", "bmtc") | {"x_r": 0, "queries": 1, "t": call.s}
    else:
        arguments |= _as(call, *x, "x", "bmtrc")
    return arguments | _as(call, *y, "y", "bmsc")


def _erased(call: ChunkCall) -> tuple[str, str]:
    """The argument name and axes of the keys that are erased: `erase`, or k if none are given."""
    return KEY if call.arguments["erase"] is None else ERASE


def _scores(
    call: ChunkCall, x: tuple[str, str], y: tuple[str, str], queries: int, **extra: Argument
) -> Tensor:
    """s dF/dA (queries, T, C)."""
    scores = call.empty(queries, call.tokens, call.chunk)
    call.launch(
        channel_decay.channel_scores,
        "channel_scores",
        (call.tokens // channel_decay.SUB.value, queries),
        **_pair(call, x, y) | extra,
        scores=scores,
        BLOCK=call.gate_block("channel_scores"),
    )
    return scores


def _gradient(
    call: ChunkCall,
    x: tuple[str, str] | None,
    y: tuple[str, str],
    pairs: Tensor,
    others: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Argument, Argument]:
    """The derivatives of F: dx (m r, T, w), and, with x, also dy and dg (m, T, w).

    If `others` are given, dy and dg are added to them.
    """
    heads, shape = call.b * call.m, (call.tokens, call.gate_step)
    d_x = call.empty(pairs.shape[0], *shape)
    d_y, d_gates = others or (None if x is None else call.empty(heads, *shape) for _ in range(2))
    block = call.gate_block("channel_gradient")
    subs = call.tokens // channel_decay.SUB.value
    call.launch(
        channel_decay.channel_gradient,
        "channel_gradient",
        (subs * call.gate_step // block, heads),
        **_pair(call, x, y),
        pairs=pairs,
        d_x=d_x,
        d_y=d_y,
        d_gates=d_gates,
        BLOCK=block,
        ADDS=others is not None,
    )
    return d_x, d_y, d_gates


def decayed(call: ChunkCall, x: tuple[str, str], factors: str) -> Tensor:
    """reading ∘ Q or writing ∘ K (m r, T, w), with gates of key channels."""
    is_key = x is KEY
    rows = call.b * call.m * (1 if is_key else call.r)
    out = call.empty(rows, call.tokens, call.gate_step)
    block = call.gate_block("channel_gates")
    arguments = _as(call, *x, "x", "bmtc" if is_key else "bmtrc")
    call.launch(
        channel_gates.apply_decay,
        "channel_gates",
        (call.count * call.gate_step // block, rows),
        **{"x_r": 0} | arguments,
        factors=call.arguments[factors],
        decayed=out,
        queries=1 if is_key else call.r,
        count=call.s if is_key else call.t,
        missing=0 if is_key else call.s - call.t,
        width=call.d,
        BLOCK=block,
    )
    return out


def tril_of_products(call: ChunkCall, x: tuple[str, str], y: tuple[str, str]) -> Tensor:
    """s tril(x yᵀ) (m r, T, C), with U for V by the delta rule."""
    queries = call.b * call.m * call.r
    products = call.empty(queries, call.tokens, call.chunk)
    call.launch(
        chunk_gradient.d_scores_of,
        "chunk_scores_gradient",
        (call.count, queries),
        **_as(call, *x, *COTANGENT),
        **_as(call, *y, *VALUE),
        e=call.arguments["d" if y is KEY else "e"],
        STEP=call.width if y is KEY else call.step,
        u=None if y is KEY else call.arguments["u"],
        gates=None,
        d_scores=products,
        crossing_scores=None,
        BLOCK=call.both("chunk_scores_gradient"),
    )
    return products


def decayed_scores(call: ChunkCall) -> Tensor:
    """s D ∘ Q Kᵀ (m r, T, C), with gates of key channels."""
    return _scores(call, QUERY, KEY, call.b * call.m * call.r)


def erase_scores(call: ChunkCall) -> Tensor:
    """tril(D ∘ E Kᵀ) (m, T, C), with gates of key channels."""
    return _scores(call, _erased(call), KEY, call.b * call.m, scale=1.0)


def outputs_within_chunks(call: ChunkCall) -> Tensor:
    """The part of O within chunks (m r, T, w), with gates of value channels."""
    scores = tril_of_products(call, QUERY, KEY)
    return _gradient(call, None, VALUE, scores)[0]


def key_gate_gradients(call: ChunkCall, d_scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dQ (m r, T, w), dK and dg (m, T, w) within chunks, with gates of key channels."""
    return _gradient(call, QUERY, KEY, d_scores)


def erase_gate_gradients(call: ChunkCall, d_pairs: Tensor, others: tuple[Tensor, Tensor]) -> Tensor:
    """dE (m, T, w) within chunks, with gates of key channels; dK and dg are added to `others`."""
    return _gradient(call, _erased(call), KEY, d_pairs, others)[0]


def value_gate_gradients(call: ChunkCall) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of scores (m r, T, C), dV and dg (m, T, w), with gates of value channels."""
    scores = tril_of_products(call, QUERY, KEY)
    _, d_v, d_gates = _gradient(call, COTANGENT, VALUE, scores)
    d_scores = _scores(call, COTANGENT, VALUE, call.b * call.m * call.r)
    return d_scores, d_v, d_gates
