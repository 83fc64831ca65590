"""CCQ's query with the covariance of all keys so far, without a backbone: arrays and launches.

    lengths of k and k̄ (`row_lengths.py`) → moments of k̄ before every chunk (`moments.py`, or a
    backbone's pass over the same keys) → lengths of q, q^c (`contraction.py`)

and backward, with the moments recomputed,

    → lengths of q, dq, dλ (`contraction_gradient.py`) → gradients of the moments, dk
    (`moments_gradient.py`).

Three launches forward and five backward; PyTorch computes no norm and no product. 4 d² + 4 C d
FLOPs per token and head forward, and 10 d² + 14 C d backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from precondattn.frame import Frame
from precondattn.spec.array_functions import swap_time_and_heads, where_valid
from precondattn.spec.linear_family import forget_other_segments, queries_of_states
from precondattn.spec.recurrence import Stream
from precondattn_triton.ccq import contraction, contraction_gradient, moments_gradient, row_lengths
from precondattn_triton.precision import is_half, product_precision
from precondattn_triton.recurrence.chunk_arrays import (
    ChunkCall,
    shared_heads,
    tokens_of_chunk,
)
from precondattn_triton.recurrence.chunkwise import prepare_numbers
from precondattn_triton.recurrence.moments import Moments, carry_moments
from precondattn_triton.tiles import bytes_of, factor_dtype

Tensors = Mapping[str, Tensor]


class KeyGradients(NamedTuple):
    """Gradients of the keys from the backbone (b, s, m, d), to be added."""

    unit: Tensor | None = None
    raw: Tensor | None = None


class Conditioned:
    """One call: queries (b, t, h, d), keys (b, s, n, d), and λ (b, t, h).

    First `carry` computes the moments, or a backbone's pass with `moments` does. Then
    `contract` computes the queries, or `backward` the gradients.
    """

    def __init__(self, eps: float, x: Tensors, frame: Frame, chunk: int | None = None) -> None:
        q, k = x["q"], where_valid(swap_time_and_heads(x["k"]), frame)
        b, n, s, d = k.shape
        zero = torch.zeros((), dtype=torch.float32, device=k.device)
        g = zero.expand(b, n, s, 1, 1)
        stream = Stream(queries_of_states(q, n), k, k, forget_other_segments(g, frame))
        state = zero.expand(b, n, d, d)
        half = is_half(k.dtype)
        has_segments = frame.k_segment is not None
        precision = product_precision(k.dtype)
        chunk = chunk or tokens_of_chunk("chunk_moments", d, d, half, k)
        self.call = call = ChunkCall(stream, state, has_segments, 1.0, precision, half, chunk)
        for name in ("gates", "reading", "writing", "total", "strength"):
            call.arguments[name] = None
        if has_segments:
            prepare_numbers(call, stream)
        valid = bytes_of(frame.among_keys(s).q_valid, b)
        of_queries = shared_heads(x["contraction"].transpose(1, 2))
        call.arguments |= {"valid": valid, "contraction": of_queries}
        self.unit = torch.empty((b, s, n, d), dtype=k.dtype, device=k.device)
        """k̄"""
        call.arguments |= {"least": math.sqrt(eps), "k_scale": call.empty(b * n, call.tokens)}
        call.launch(
            row_lengths.unit_keys,
            "row_lengths",
            (call.count, b * n),
            x=shared_heads(k),
            inverse=call.arguments["k_scale"],
            unit=self.unit,
        )
        call.arguments["k"] = shared_heads(self.unit.transpose(1, 2))

    def moments(self, *, reads_unit_keys: bool = True) -> Moments:
        """The moments, to be computed in a pass over the keys k̄, or over k."""
        call = self.call
        heads, width, dtype = call.b * call.m, call.width, factor_dtype(self.unit.dtype)
        second = call.empty(heads, call.count, width, width, dtype=dtype)
        sums, counts = call.empty(heads, call.count, width), call.empty(heads, call.count)
        call.arguments |= {"moments": second, "sums": sums, "counts": counts}
        scale = None if reads_unit_keys else call.arguments["k_scale"]
        valid, writing, total = (call.arguments[name] for name in ("valid", "writing", "total"))
        return Moments(self.unit, scale, valid, writing, total, second, sums, counts)

    def carry(self) -> None:
        """Compute the moments in a separate pass."""
        call, block = self.call, self.call.keys("chunk_moments")
        call.launch(
            carry_moments,
            "chunk_moments",
            (call.width // block, call.b * call.m),
            moments=self.moments(),
            BLOCK=block,
        )

    def contract(self, out: Tensor) -> None:
        """Write q^c (b, t, h, d), contiguous, after the moments have been computed."""
        call = self.call
        call.launch(
            contraction.contract,
            "chunk_contraction",
            (call.count, call.b * call.m * call.r),
            o=out,
            KEYS=call.keys("chunk_contraction"),
        )

    def backward(self, d_o: Tensor, keys: KeyGradients | None = None) -> dict[str, Tensor]:
        """The gradients of q, k and λ, in the dtypes of q and k, and in float32."""
        call = self.call
        heads, (b, t, m, r, d) = call.b * call.m, (call.b, call.t, call.m, call.r, call.d)
        d_o = queries_of_states(d_o, m)
        call.arguments["d_o"] = shared_heads(d_o)
        for name in ("q_scale", "weight", "mean_q", "mean_h"):
            call.arguments[name] = call.empty(heads * r, call.tokens)
        d_q = call.empty(b, t, m, r, d, dtype=self.unit.dtype)
        d_contraction = call.empty(b, t, m, r)
        call.launch(
            contraction_gradient.contract_back,
            "chunk_contraction",
            (call.count, heads * r),
            d_q=d_q,
            d_contraction=d_contraction,
            KEYS=call.keys("chunk_contraction"),
        )
        d_k = self._d_keys(keys or KeyGradients())
        return {"q": d_q.flatten(2, 3), "k": d_k, "contraction": d_contraction.flatten(2, 3)}

    def _d_keys(self, more: KeyGradients) -> Tensor:
        call, block = self.call, self.call.keys("chunk_moments")
        heads = call.b * call.m
        call.arguments["d_moments"] = torch.empty_like(call.arguments["moments"])
        call.arguments["d_sums"] = torch.empty_like(call.arguments["sums"])
        call.launch(
            moments_gradient.carry_moments_back,
            "chunk_moments",
            (call.width // block, heads),
            BLOCK=block,
        )
        d_k = torch.empty_like(self.unit)
        call.launch(
            moments_gradient.d_keys_of_moments,
            "chunk_contraction",
            (call.count, heads),
            d_k=d_k,
            d_unit=more.unit,
            d_raw=more.raw,
            KEYS=call.keys("chunk_contraction"),
        )
        return d_k
