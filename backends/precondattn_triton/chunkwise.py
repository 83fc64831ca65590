"""The recurrence of linear attention and the delta rule in chunks, by Triton kernels.

    U = M β (V − reading ∘ K S)  (additive: U = V),    O = s (reading ∘ Q S + (D ∘ Q Kᵀ) U),
    S ← total ∘ S + (writing ∘ K)ᵀ U

with D and the factors of `chunk_tiles.py` and M of `chunk_inverse.py`. Chunks are prepared all at
once (`delta_rule.py`), states go from chunk to chunk (`chunk_states.py`), and chunks are read all
at once (`chunk_reads.py`). The gradient makes the states anew, goes back over them, and has the
rest of all chunks at once (`chunk_gradient.py`, and `gate_sums.py` for the gates). One token alone
has a kernel of its own (`recurrent_step.py`).

In memory stand, besides inputs, outputs and their gradients, a state of d e numbers in float32 for
each chunk, M and two rows of numbers for each token; in the gradient, twice that and a few rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from precondattn.spec.recurrence import ByTokens, Gradients, Stream
from precondattn_triton import (
    chunk_gradient,
    chunk_inverse,
    chunk_reads,
    chunk_states,
    delta_rule,
    gate_sums,
    recurrent_step,
)
from precondattn_triton.chunk_arrays import Call, strides
from precondattn_triton.precision import exact


class Chunkwise:
    """A `Form` of the recurrence (`precondattn.spec.recurrence`), with the outputs times `scale`.

    A stream's queries, keys and values are multiplied in their dtype, and may have fewer heads than
    the state; `decays` says whether there are gates. Gradients are of the queries times `scale`.
    """

    def __init__(self, precision: str, *, half: bool, decays: bool, scale: float = 1.0) -> None:
        self.precision, self.half, self.decays, self.scale = precision, half, decays, scale

    def forward(self, x: Stream, state: Tensor) -> tuple[Tensor, Tensor]:
        call = self._call(x, state)
        if call.s == 1 and call.t == 1:
            return self._step(call, x)
        self._prepare(call, x)
        final = _carry(call)
        o = call.empty(call.b, call.t, call.m, call.r, call.e, dtype=x.v.dtype)
        values = call.values("chunk_reads")
        call.launch(
            chunk_reads.read,
            "chunk_reads",
            (call.count * call.step // values, call.b * call.m * call.r),
            o=o,
            KEYS=call.keys("chunk_reads"),
            BLOCK=values,
        )
        return o.transpose(1, 2), final

    def vjp(self, x: Stream, state: Tensor, d_o: Tensor, d_final: Tensor) -> Gradients:
        call = self._call(x, state)
        self._prepare(call, x)
        _carry(call)
        call.known |= {"d_o": d_o, **strides("o", d_o, "bmtre")}
        d_initial = _carry_back(call, d_final)
        d_v = self._d_written(call, x)
        d_q = _d_queries(call, x)
        d_k = _d_keys(call, x)
        d_g, d_beta = self._d_numbers(call, x)
        stream = Stream(d_q.transpose(1, 2), d_k.transpose(1, 2), d_v, d_g, d_beta)
        return Gradients(stream, d_initial)

    @staticmethod
    def by_tokens(function: ByTokens, *arrays: Any, axis: int = 2) -> tuple[Any, ...]:
        return function(*arrays)

    def read(
        self, streams: Sequence[tuple[Stream, Any]], function: ByTokens, *arrays: Any
    ) -> tuple[tuple[Any, ...], list[Any]]:
        done = [self.forward(stream, state) for stream, state in streams]
        return function(*(o for o, _ in done), *arrays), [final for _, final in done]

    def _call(self, x: Stream, state: Tensor) -> Call:
        return Call(x, state, self.scale, self.precision, self.half)

    def _step(self, call: Call, x: Stream) -> tuple[Tensor, Tensor]:
        b, m = call.b, call.m
        final = call.empty(b, m, call.d, call.e)
        o = call.empty(b, 1, m, call.r, call.e, dtype=x.v.dtype)
        gates = x.g[:, :, 0] if self.decays else None
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
            **_strides_if("g", gates, "bmde"),
            **_strides_if("beta", beta, "bm"),
        )
        return o.transpose(1, 2), final

    def _prepare(self, call: Call, x: Stream) -> None:
        """Gates and their factors; by the delta rule M, Y and W."""
        heads, tokens = call.b * call.m, call.tokens
        gates = x.g[..., 0, 0] if self.decays else None
        names = ["gates", "reading", "writing"] if self.decays else []
        names += [] if x.beta is None else ["strength"]
        absent = dict.fromkeys(
            ("gates", "reading", "writing", "total", "strength", "inverse", "y", "w", "u")
        )
        call.known |= absent | {name: call.empty(heads, tokens) for name in names}
        if self.decays:
            call.known["total"] = call.empty(heads, call.count)
        if names:
            call.launch(
                gate_sums.load_factors,
                "gate_sums",
                (call.count, heads),
                g=gates,
                beta=x.beta,
                **_strides_if("g", gates, "bms"),
                **_strides_if("beta", x.beta, "bms"),
            )
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
            BLOCK=min(call.keys("delta_prepare"), call.values("delta_prepare")),
        )

    def _d_written(self, call: Call, x: Stream) -> Tensor:
        """The gradient of the values (b, m, s, e)."""
        call.known |= dict.fromkeys(("d_right", "d_keys", "d_strength", "crossing_keys"))
        if x.beta is None:
            d_v = call.known["d_u"].view(call.b, call.m, call.tokens, call.step)
            return d_v[:, :, : call.s, : call.e]
        heads, tokens = call.b * call.m, call.tokens
        call.known["d_right"] = call.empty(heads, tokens, call.step)
        call.known["d_keys"] = call.empty(heads, tokens, call.chunk)
        call.known["d_strength"] = call.empty(heads, tokens)
        if self.decays:
            call.known["crossing_keys"] = call.empty(heads, tokens)
        d_v = call.empty(call.b, call.s, call.m, call.e, dtype=_of_heads(x.v, call))
        call.launch(
            delta_rule.d_written,
            "delta_keys",
            (call.count, heads),
            d_v=d_v,
            BLOCK=min(call.keys("delta_keys"), call.values("delta_keys")),
        )
        return d_v.transpose(1, 2)

    def _d_numbers(self, call: Call, x: Stream) -> tuple[Any, Any]:
        """The gradients of the gates, as those came, and of β (b, m, s)."""
        heads = call.b * call.m
        d_g = call.empty(heads, call.s) if self.decays else None
        d_beta = None if x.beta is None else call.empty(heads, call.s)
        if d_g is not None or d_beta is not None:
            call.launch(
                gate_sums.gate_gradient,
                "gate_sums",
                (call.count, heads),
                crossing=call.known["crossing_scores"],
                d_g=d_g,
                d_beta=d_beta,
                READ_BLOCKS=call.width // call.keys("chunk_query_gradient"),
                KEY_BLOCKS=call.width // call.keys("chunk_key_gradient"),
            )
        if d_beta is not None:
            d_beta = d_beta.view(call.b, call.m, call.s)
        return torch.zeros_like(x.g) if d_g is None else d_g.view(x.g.shape), d_beta


def _strides_if(name: str, array: Tensor | None, axes: str) -> dict[str, int]:
    return {f"{name}_{axis}": 0 for axis in axes} if array is None else strides(name, array, axes)


def _of_heads(x: Tensor, call: Call) -> torch.dtype:
    """The dtype of a gradient by heads with a state: sums over those that share are in float32."""
    return x.dtype if x.shape[1] == call.m else torch.float32


def _carry(call: Call) -> Tensor:
    """The last state, with those in front of every chunk left in the call."""
    heads = call.b * call.m
    final = call.empty(call.b, call.m, call.d, call.e)
    call.known["states"] = call.empty(heads, call.count, call.width, call.step)
    if call.known["y"] is not None:
        call.known["u"] = call.empty(heads, call.tokens, call.step)
    values = call.values("chunk_states")
    call.launch(
        chunk_states.carry_states,
        "chunk_states",
        (call.step // values, heads),
        final=final,
        BLOCK=values,
    )
    return final


def _carry_back(call: Call, d_final: Tensor) -> Tensor:
    """The gradient of the first state, with those behind every chunk, and dU, left in the call."""
    heads = call.b * call.m
    call.known["local"] = call.empty(heads, call.tokens, call.step)
    values = call.values("chunk_reads")
    call.launch(
        chunk_reads.read_back,
        "chunk_reads",
        (call.count * call.step // values, heads),
        KEYS=call.keys("chunk_reads"),
        BLOCK=values,
    )
    d_initial = call.empty(call.b, call.m, call.d, call.e)
    call.known["d_states"] = torch.empty_like(call.known["states"])
    call.known["d_u"] = torch.empty_like(call.known["local"])
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


def _d_queries(call: Call, x: Stream) -> Tensor:
    """(b, t, m, r, d), with the gradient of the scores left in the call."""
    queries, decays = call.b * call.m * call.r, call.known["gates"] is not None
    call.known["d_scores"] = call.empty(queries, call.tokens, call.chunk)
    call.known["crossing_scores"] = call.empty(queries, call.tokens) if decays else None
    both = min(call.keys("chunk_scores_gradient"), call.values("chunk_scores_gradient"))
    call.launch(
        chunk_gradient.d_scores_of,
        "chunk_scores_gradient",
        (call.count, queries),
        BLOCK=both,
    )
    d_q = call.empty(call.b, call.t, call.m, call.r, call.d, dtype=_of_heads(x.q, call))
    keys = call.keys("chunk_query_gradient")
    blocks = call.width // keys
    call.known["read"] = call.empty(queries, blocks, call.tokens) if decays else None
    call.launch(
        chunk_gradient.d_queries,
        "chunk_query_gradient",
        (call.count * blocks, queries),
        d_q=d_q,
        KEYS=keys,
        BLOCK=call.values("chunk_query_gradient"),
    )
    return d_q


def _d_keys(call: Call, x: Stream) -> Tensor:
    """(b, s, m, d)"""
    heads, decays = call.b * call.m, call.known["gates"] is not None
    keys = call.keys("chunk_key_gradient")
    blocks = call.width // keys
    call.known |= dict.fromkeys(("written", "from_keys", "overlap"))
    if decays:
        call.known["written"] = call.empty(heads, blocks, call.tokens)
        call.known["overlap"] = call.empty(heads, call.count, call.width)
    if call.known["d_right"] is not None:
        call.known["from_keys"] = call.empty(heads, blocks, call.tokens)
    d_k = call.empty(call.b, call.s, call.m, call.d, dtype=_of_heads(x.k, call))
    call.launch(
        chunk_gradient.d_keys_of,
        "chunk_key_gradient",
        (call.count * blocks, heads),
        d_k=d_k,
        KEYS=keys,
        BLOCK=call.values("chunk_key_gradient"),
    )
    return d_k
