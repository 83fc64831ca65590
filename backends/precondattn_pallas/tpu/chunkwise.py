"""The recurrence of linear attention and the delta rule on a TPU: from arrays to launches.

Two kernels: `chunk_forward.py` and `chunk_backward.py`. The gradient first runs the forward kernel
again to store the state before every chunk, d e numbers for 128 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp

from precondattn.arrays import Array, Arrays, DType
from precondattn.backend import Request
from precondattn.spec.recurrence import Form, Stream, StreamGradients
from precondattn.spec.stateful import Stateful
from precondattn_pallas.launch import Interpret
from precondattn_pallas.recurrence.chunk_arrays import (
    LOWEST,
    empty,
    queries_of,
    unpadded,
    unpadded_queries,
)
from precondattn_pallas.recurrence.chunkwise import Chunkwise
from precondattn_pallas.recurrence.leaves import RecurrenceKernels
from precondattn_pallas.tpu.chunk_backward import backward
from precondattn_pallas.tpu.chunk_forward import BETA, GATE, forward
from precondattn_pallas.tpu.launch import LANES, SUBLANES, block, in_lanes, launch, padded
from precondattn_pallas.tpu.products import TpuProducts, products
from precondattn_pallas.tpu.tiles import number_of, numbers_of

CHUNK = LANES
"""Tokens of a chunk."""

MOST_BYTES = 12 << 20
"""Bytes of blocks and scratch, of a kernel's 16 MiB: the rest is for intermediate results."""


class TpuChunks(NamedTuple):
    """Blocks of arrays by heads, for a grid of (heads, chunks)."""

    number: int
    reverse: bool = False

    def _chunk(self, i: Array) -> Array:
        return self.number - 1 - i if self.reverse else i

    def rows(self, array: Array) -> tuple[Array, Array]:
        """The chunk's rows of (m, T, w)."""
        width = array.shape[2]
        return array, block(None, CHUNK, width, at=lambda h, i: (h, self._chunk(i), 0))

    def group(self, array: Array) -> tuple[Array, Array]:
        """The chunk's rows of (m, r, T, w)."""
        _, r, _, width = array.shape
        return array, block(None, r, CHUNK, width, at=lambda h, i: (h, 0, self._chunk(i), 0))

    def of_chunk(self, array: Array) -> tuple[Array, Array]:
        """The chunk's part of (m, chunks, …, …)."""
        rest = array.shape[2:]
        return array, block(None, None, *rest, at=lambda h, i: (h, self._chunk(i), 0, 0))

    def of_head(self, array: Array) -> tuple[Array, Array]:
        """The head's part of (m, …, …)."""
        rest = array.shape[1:]
        return array, block(None, *rest, at=lambda h, _: (h, 0, 0))


class TpuChunkwise(Chunkwise):
    """A `Form` of the recurrence (`precondattn.spec.recurrence`).

    Products of queries, keys and values are in a given dtype; `decays` says whether there are
    gates.
    """

    def __init__(
        self, products: TpuProducts, dtype: DType, *, decays: bool, interpret: Interpret
    ) -> None:
        super().__init__(products, dtype, decays=decays)  # type: ignore[arg-type]
        self.interpret = interpret

    def forward(self, x: Stream, state: Array) -> tuple[Array, Array]:
        inputs = self._inputs(x)
        outputs = {"o": (*inputs["q"].shape[:3], inputs["v"].shape[2])}
        result = self._forward(x, inputs, state, outputs)
        return unpadded_queries(result["o"], x, x.v.shape[3]), unpadded(result["final"], state)

    def vjp(self, x: Stream, state: Array, d_o: Array, d_final: Array) -> StreamGradients:
        inputs = self._inputs(x)
        m, r, tokens, d = inputs["q"].shape
        e, s = inputs["v"].shape[2], x.k.shape[2]
        chunks = TpuChunks(tokens // CHUNK, reverse=True)
        states = self._forward(x, inputs, state, {"states": (m, chunks.number, d, e)})["states"]
        result = launch(
            backward,
            (m, chunks.number),
            {
                **self._blocks(inputs, chunks),
                "state": chunks.of_chunk(states),
                "d_o": chunks.group(queries_of(d_o, s, tokens, e).astype(self.dtype)),
                "end": chunks.of_head(_padded_state(d_final)),
            },
            {
                "d_q": chunks.group(empty(m, r, tokens, d)),
                "d_k": chunks.rows(empty(m, tokens, d)),
                "d_v": chunks.rows(empty(m, tokens, e)),
                "d_numbers": chunks.of_chunk(empty(m, chunks.number, SUBLANES, CHUNK)),
                "d_start": chunks.of_head(empty(m, d, e)),
            },
            {"d_state": _in_scratch(d, e)},
            **self._constants(x),
        )
        stream = Stream(
            unpadded_queries(result["d_q"], x, x.k.shape[3]),
            unpadded(result["d_k"], x.k),
            unpadded(result["d_v"], x.v),
            unpadded(number_of(result["d_numbers"], GATE), x.g)
            if self.decays
            else jnp.zeros_like(x.g),
            None if x.beta is None else unpadded(number_of(result["d_numbers"], BETA), x.beta),
        )
        return StreamGradients(stream, unpadded(result["d_start"], d_final))

    def _forward(
        self, x: Stream, inputs: Mapping[str, Array], state: Array, outputs: Mapping[str, Array]
    ) -> Arrays:
        """The final state, and o and the states before chunks if `outputs` has their shapes."""
        start = _padded_state(state)
        m, tokens, _ = inputs["k"].shape
        chunks = TpuChunks(tokens // CHUNK)
        specs = {"o": chunks.group, "states": chunks.of_chunk}
        return launch(
            forward,
            (m, chunks.number),
            {**self._blocks(inputs, chunks), "start": chunks.of_head(start)},
            {
                **{name: specs[name](empty(*shape)) for name, shape in outputs.items()},
                "final": chunks.of_head(empty(*start.shape)),
            },
            {"state": _in_scratch(*start.shape[1:])},
            **self._constants(x),
        )

    def _inputs(self, x: Stream) -> Arrays:
        """Inputs of both kernels, by heads and in whole blocks."""
        b, m, s, d = x.k.shape
        tokens, width = -(-s // CHUNK) * CHUNK, in_lanes(d)

        def by_heads(array: Array, *sizes: int) -> Array:
            return padded(array.reshape(b * m, *array.shape[2:]), tokens, *sizes)

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

    def _blocks(self, inputs: Mapping[str, Array], chunks: TpuChunks) -> Arrays:
        specs = {"q": chunks.group, "k": chunks.rows, "v": chunks.rows, "numbers": chunks.of_chunk}
        return {name: specs[name](array) for name, array in inputs.items()}

    def _constants(self, x: Stream) -> Arrays:
        return {
            "products": self.products,
            "delta": x.beta is not None,
            "gates": self.decays,
            "interpret": self.interpret,
        }


def on_a_tpu(dtype: DType, operands: Array, *, decays: bool, interpret: Interpret) -> Form:
    """The form for inputs of a dtype, with q, k and v in another."""
    return TpuChunkwise(products(dtype), operands, decays=decays, interpret=interpret)


def _in_scratch(*shape: int) -> Array:
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.VMEM(shape, jnp.float32)


def _padded_state(state: Array) -> Array:
    """(b, m, d, e) as (b m, d, e), padded to whole tiles, in float32."""
    b, m, d, e = state.shape
    return padded(state.astype(jnp.float32).reshape(b * m, d, e), in_lanes(d), in_lanes(e))


class TpuRecurrence(RecurrenceKernels):
    """Algorithm of linear leaves with one decay for each state, and of CCQ's query.

    The blocks of a program must fit VMEM; all queries of a state are loaded at once.
    """

    form_of = staticmethod(on_a_tpu)

    def refuses(self, leaf: Stateful, request: Request) -> str | None:
        reason = super().refuses(leaf, request)
        if reason is not None:
            return reason
        shapes = dict(request.shapes)
        r = max(1, shapes["q"][2] // shapes["k"][2])
        d, e = shapes["k"][3], shapes.get("v", shapes["k"])[3]
        if leaf.declares is not None and leaf.declares.normaliser == "sum":
            e += 1  # The sum of weights is one more channel.
        d, e = in_lanes(d), in_lanes(e)
        size = bytes_of(r, d, e)
        if size > MOST_BYTES:
            return (
                f"its recurrence has at most {MOST_BYTES >> 20} MiB of a TPU's VMEM; "
                f"{r} queries to a state, d={d} and e={e} need {size / (1 << 20):.1f} MiB"
            )
        return None


def bytes_of(r: int, d: int, e: int) -> int:
    """Bytes of VMEM that the gradient's kernel needs, the larger of the two: each block twice."""
    rows = CHUNK * (r * (2 * d + e) + 2 * d + 2 * e)
    return 4 * (2 * (rows + 3 * d * e) + d * e)
