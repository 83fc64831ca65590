"""The recurrence of linear attention and the delta rule on a TPU: from arrays to launches.

Two kernels: `chunk_forward.py`, and `chunk_backward.py` behind one more run of the first, which
leaves the state in front of every chunk in memory, d e numbers for 128 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from precondattn.spec.recurrence import Form, Gradients, Stream
from precondattn_pallas.recurrence.chunk_arrays import (
    LOWEST,
    empty,
    queries_of,
    unfilled_queries,
    unfilled_state,
)
from precondattn_pallas.recurrence.chunkwise import Chunkwise
from precondattn_pallas.tpu.chunk_backward import backward
from precondattn_pallas.tpu.chunk_forward import BETA, GATE, forward
from precondattn_pallas.tpu.launch import LANES, SUBLANES, block, filled, in_lanes, launch
from precondattn_pallas.tpu.products import TpuProducts, products
from precondattn_pallas.tpu.tiles import number_of, numbers_of

CHUNK = LANES
"""Tokens."""


class Chunks(NamedTuple):
    """Blocks of arrays by heads, for a grid of (heads, chunks)."""

    count: int
    reverse: bool = False

    def _chunk(self, i: Any) -> Any:
        return self.count - 1 - i if self.reverse else i

    def rows(self, array: Any) -> tuple[Any, Any]:
        """The chunk's of (m, T, w)."""
        width = array.shape[2]
        return array, block(None, CHUNK, width, at=lambda h, i: (h, self._chunk(i), 0))

    def group(self, array: Any) -> tuple[Any, Any]:
        """The same of (m, r, T, w)."""
        _, r, _, width = array.shape
        return array, block(None, r, CHUNK, width, at=lambda h, i: (h, 0, self._chunk(i), 0))

    def of_chunk(self, array: Any) -> tuple[Any, Any]:
        """The chunk's own of (m, chunks, …, …)."""
        rest = array.shape[2:]
        return array, block(None, None, *rest, at=lambda h, i: (h, self._chunk(i), 0, 0))

    def of_head(self, array: Any) -> tuple[Any, Any]:
        """The head's own of (m, …, …)."""
        rest = array.shape[1:]
        return array, block(None, *rest, at=lambda h, _: (h, 0, 0))


class TpuChunkwise(Chunkwise):
    """A `Form` of the recurrence (`precondattn.spec.recurrence`).

    Queries, keys and values are multiplied in a dtype; `decays` says whether there are gates.
    """

    def __init__(self, products: TpuProducts, dtype: Any, *, decays: bool, interpret: Any) -> None:
        self.products, self.dtype, self.decays = products, dtype, decays
        self.interpret = interpret

    def forward(self, x: Stream, state: Any) -> tuple[Any, Any]:
        given = self._given(x)
        outputs = {"o": (*given["q"].shape[:3], given["v"].shape[2])}
        found = self._forward(x, given, state, outputs)
        return unfilled_queries(found["o"], x, x.v.shape[3]), unfilled_state(found["final"], state)

    def vjp(self, x: Stream, state: Any, d_o: Any, d_final: Any) -> Gradients:
        given = self._given(x)
        m, r, tokens, d = given["q"].shape
        e, s = given["v"].shape[2], x.k.shape[2]
        chunks = Chunks(tokens // CHUNK, reverse=True)
        states = self._forward(x, given, state, {"states": (m, chunks.count, d, e)})["states"]
        found = launch(
            backward,
            (m, chunks.count),
            {
                **self._blocks(given, chunks),
                "state": chunks.of_chunk(states),
                "d_o": chunks.group(queries_of(d_o, s, tokens, e).astype(self.dtype)),
                "end": chunks.of_head(_padded_state(d_final)),
            },
            {
                "d_q": chunks.group(empty(m, r, tokens, d)),
                "d_k": chunks.rows(empty(m, tokens, d)),
                "d_v": chunks.rows(empty(m, tokens, e)),
                "d_numbers": chunks.of_chunk(empty(m, chunks.count, SUBLANES, CHUNK)),
                "d_start": chunks.of_head(empty(m, d, e)),
            },
            {"d_state": _in_scratch(d, e)},
            **self._constants(x),
        )
        stream = Stream(
            unfilled_queries(found["d_q"], x, x.k.shape[3]),
            _of_rows(found["d_k"], x.k),
            _of_rows(found["d_v"], x.v),
            _of_numbers(found["d_numbers"], GATE, x.g) if self.decays else jnp.zeros_like(x.g),
            None if x.beta is None else _of_numbers(found["d_numbers"], BETA, x.beta),
        )
        return Gradients(stream, unfilled_state(found["d_start"], d_final))

    def _forward(
        self, x: Stream, given: Mapping[str, Any], state: Any, outputs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The final state, and of o and states what shapes are given of."""
        start = _padded_state(state)
        m, tokens, _ = given["k"].shape
        chunks = Chunks(tokens // CHUNK)
        places = {"o": chunks.group, "states": chunks.of_chunk}
        return launch(
            forward,
            (m, chunks.count),
            {**self._blocks(given, chunks), "start": chunks.of_head(start)},
            {
                **{name: places[name](empty(*shape)) for name, shape in outputs.items()},
                "final": chunks.of_head(empty(*start.shape)),
            },
            {"state": _in_scratch(*start.shape[1:])},
            **self._constants(x),
        )

    def _given(self, x: Stream) -> dict[str, Any]:
        """What both kernels read of a stream, by heads and in whole blocks."""
        b, m, s, d = x.k.shape
        tokens, width = -(-s // CHUNK) * CHUNK, in_lanes(d)

        def by_heads(array: Any, *sizes: int) -> Any:
            return filled(array.reshape(b * m, *array.shape[2:]), tokens, *sizes)

        rows = []
        if x.beta is not None or self.decays:
            rows = [jnp.zeros((b * m, tokens)) if x.beta is None else by_heads(x.beta)]
        if self.decays:
            rows.append(by_heads(jnp.maximum(x.g[..., 0, 0], LOWEST)))
        return {
            "q": queries_of(x.q, s, tokens, width).astype(self.dtype),
            "k": by_heads(x.k.astype(self.dtype), width),
            "v": by_heads(x.v.astype(self.dtype), in_lanes(x.v.shape[3])),
            **({"numbers": numbers_of(rows, CHUNK)} if rows else {}),
        }

    def _blocks(self, given: Mapping[str, Any], chunks: Chunks) -> dict[str, Any]:
        places = {"q": chunks.group, "k": chunks.rows, "v": chunks.rows, "numbers": chunks.of_chunk}
        return {name: places[name](array) for name, array in given.items()}

    def _constants(self, x: Stream) -> dict[str, Any]:
        return {
            "products": self.products,
            "delta": x.beta is not None,
            "gates": self.decays,
            "interpret": self.interpret,
        }


def on_a_tpu(dtype: Any, operands: Any, *, decays: bool, interpret: Any) -> Form:
    """For inputs of a dtype, with q, k and v in another."""
    return TpuChunkwise(products(dtype), operands, decays=decays, interpret=interpret)


def _in_scratch(*shape: int) -> Any:
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.VMEM(shape, jnp.float32)


def _padded_state(state: Any) -> Any:
    """(b, m, d, e) as (b m, d, e), whole tiles of float32."""
    b, m, d, e = state.shape
    return filled(state.astype(jnp.float32).reshape(b * m, d, e), in_lanes(d), in_lanes(e))


def _of_rows(rows: Any, like: Any) -> Any:
    return rows[:, : like.shape[2], : like.shape[3]].reshape(like.shape)


def _of_numbers(numbers: Any, row: int, like: Any) -> Any:
    return number_of(numbers, row)[:, : like.shape[2]].reshape(like.shape)
