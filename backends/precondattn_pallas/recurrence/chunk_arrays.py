"""A recurrence's arrays in the layout of the kernels, and the block of each for a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from precondattn.arrays import Array, Arrays, DType
from precondattn.kernel_backend.limits import padded_width
from precondattn.spec.recurrence import Stream
from precondattn_pallas.configurations import configuration
from precondattn_pallas.launch import divide, launch, remainder, shape_of, whole
from precondattn_pallas.precision import Products
from precondattn_pallas.recurrence.gate_sums import before_decays, factors_of

LOWEST = -200.0
"""A gate whose exponential is 0 in float32, used in place of −∞."""

WIDEST_BLOCK = 64
"""Largest block of value channels."""

Rows = Mapping[str, Array]
"""The arrays of a recurrence that are present, by name (`chunk_tiles.py`): q (m, r, T, d), k, v;
erase, the keys that are erased if they are not k; beta (m, T); g, reading, writing (m, T), or
(m, T, d) with one gate for each key channel; total (m, chunks, 1 or d). If keys are erased from
the state before its decay, preceding and erasing (m, T) are g and reading of the token before."""


class ChunkPlan(NamedTuple):
    """The chunks of a call, and the configurations of its kernels."""

    products: Products
    chunk: int
    width: int
    """The width by which configurations are looked up."""

    @property
    def half(self) -> bool:
        """Whether products use 16 bits or tf32."""
        return self.products.tf32

    def block(self, kernel: str, width: int) -> int:
        """Channels that a kernel processes at once, of `width` channels."""
        return min(configuration(kernel, self.width, self.half).columns, width)

    def launch(
        self,
        kernel: Callable[..., None],
        name: str,
        shape: tuple[int, ...],
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
        **constants: Array,
    ) -> Arrays:
        """Launch with the configuration of that name."""
        return launch(
            kernel,
            shape,
            inputs,
            outputs,
            configuration(name, self.width, self.half),
            interpret=self.products.interpret,
            products=self.products,
            **constants,
        )


def plan_of(products: Products, d: int, e: int, states: str = "chunk_states") -> ChunkPlan:
    """The plan for states of d × e that the kernel `states` computes."""
    width = max(padded_width(d), min(padded_width(e), 2 * WIDEST_BLOCK))
    return ChunkPlan(products, configuration(states, width, products.tf32).rows, width)


def rows_of(x: Stream, plan: ChunkPlan, dtype: DType, *, decays: bool) -> Arrays:
    """The rows of a stream with at most one gate per token; q, k and v are cast to a dtype."""
    result = written_of(x, plan, dtype, decays=decays)
    tokens, width = result["k"].shape[1:]
    return {"q": queries_of(x.q, x.k.shape[2], tokens, width).astype(dtype), **result}


def written_of(x: Stream, plan: ChunkPlan, dtype: DType, *, decays: bool) -> Arrays:
    """All rows but q: k, v, and where present gates (b, m, s, 1 or d, 1), β and keys to erase."""
    if x.undecayed is not None and x.g.shape[3] > 1:
        raise ValueError(
            "the chunkwise form erases from the state before its decay with one decay per head; "
            f"found {x.g.shape[3]}"
        )
    k, v, beta = x.k, x.v, x.beta
    erase = x.erase if x.undecayed is None else x.undecayed
    b, m, s, d = k.shape
    tokens, width = whole(s, plan.chunk) * plan.chunk, padded_width(d)

    def padded(array: Array, *widths: int) -> Array:
        """An array as (b m, T, widths), padded with zeros after the last token."""
        array = array.reshape(b * m, *array.shape[2:])
        sizes = zip((tokens, *widths), array.shape[1:], strict=True)
        return jnp.pad(array, ((0, 0), *((0, size - has) for size, has in sizes)))

    result = {
        "k": padded(k.astype(dtype), width),
        "v": padded(v.astype(dtype), padded_values(v.shape[3])),
    }
    if beta is not None:
        result["beta"] = padded(beta.astype(jnp.float32))
    if erase is not None:
        result["erase"] = padded(erase.astype(dtype), width)
    if decays:
        g = jnp.maximum(x.g[..., 0].astype(jnp.float32), LOWEST)
        result["g"] = padded(g, width) if g.shape[3] > 1 else padded(g[..., 0])
        result |= factors_of(result["g"], plan.chunk)
        if x.undecayed is not None:
            result |= before_decays(result["g"], plan.chunk)
    return result


def of_erased(x: Rows) -> Rows:
    """The rows with the decays until the keys that are erased are read."""
    return {**x, "reading": x["erasing"]} if "erasing" in x else x


def padded_values(e: int) -> int:
    """The width of values, padded to whole blocks."""
    block = min(padded_width(e), WIDEST_BLOCK)
    return whole(e, block) * block


def queries_of(q: Array, s: int, tokens: int, width: int) -> Array:
    """Queries (b, m, t, r, d) of the last t of s tokens as (b m, r, T, width), 0 for the others."""
    b, m, t, r, d = q.shape
    q = jnp.swapaxes(q.reshape(b * m, t, r, d), 1, 2)
    return jnp.pad(q, ((0, 0), (0, 0), (s - t, tokens - s), (0, width - d)))


def padded_state(state: Array) -> Array:
    """A state (b, m, d, e) as (b m, d, e), padded to whole tiles, in float32."""
    b, m, d, e = state.shape
    state = state.astype(jnp.float32).reshape(b * m, d, e)
    return jnp.pad(state, ((0, 0), (0, padded_width(d) - d), (0, padded_values(e) - e)))


def unpadded_queries(rows: Array, x: Stream, width: int) -> Array:
    """Rows (b m, r, T, w) of the last t tokens, as (b, m, t, r, width)."""
    b, m, t, r, _ = x.q.shape
    s = x.k.shape[2]
    rows = jnp.swapaxes(rows[:, :, s - t : s, :width], 1, 2)
    return rows.reshape(b, m, t, r, width)


def unpadded(array: Array, like: Array) -> Array:
    """A padded array of all heads (b m, …) with the shape (b, m, …) of `like`."""
    sizes = like.shape[2 : array.ndim + 1]
    return array[(slice(None), *map(slice, sizes))].reshape(like.shape)


def each_query(array: Array) -> Array:
    """An array (m, r, …) as (m r, …): every query of a state as if it were a head."""
    return array.reshape(-1, *array.shape[2:])


def empty(*shape: int) -> jax.ShapeDtypeStruct:
    return shape_of(shape, jnp.float32)


class ChunkGrid(NamedTuple):
    """One program for each chunk, block of columns and head: (chunks × blocks, heads)."""

    chunk: int
    chunks: int
    heads: int
    """Number of heads, or of all queries of all states where each has a program."""
    blocks: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.chunks * self.blocks, self.heads

    def _block_spec(
        self, array: Array, block: tuple[int | None, ...], *at: Array, together: int = 1
    ) -> Array:
        """The block of an array of all heads at the indices `at` (numbers, "chunk", "block"). A
        block covers one chunk, or several together."""
        by = self.heads // array.shape[0]

        def index(g: Array, h: Array) -> Array:
            chunk, block_index = divide(g, self.blocks * together), remainder(g, self.blocks)
            indices = {"chunk": chunk, "block": block_index}
            return divide(h, by), *(indices.get(i, i) for i in at)

        return array, pl.BlockSpec((None, *block), index)

    def rows(self, array: Array, width: int | None = None) -> Array:
        """The chunk's rows of (m, T, w), or the program's block of their columns."""
        block = self.chunk, width or array.shape[2]
        return self._block_spec(array, block, "chunk", "block" if width else 0)

    def around(self, array: Array, chunks: int, width: int | None = None) -> Array:
        """The rows of `chunks` chunks together, which include the program's own."""
        rows = chunks * array.shape[1] // self.chunks
        block, at = (rows, width or array.shape[2]), "block" if width else 0
        return self._block_spec(array, block, "chunk", at, together=chunks)

    def group(self, array: Array, width: int | None = None) -> Array:
        """The chunk's rows of (m, r, T, w), or the program's block of their columns."""
        block = array.shape[1], self.chunk, width or array.shape[3]
        return self._block_spec(array, block, 0, "chunk", "block" if width else 0)

    def numbers(self, array: Array) -> Array:
        """The chunk's numbers of (m, T), one per token."""
        return self._block_spec(array, (self.chunk,), "chunk")

    def named(self, x: Rows, *names: str) -> Arrays:
        """The chunk's part of the named arrays that are present: one number or a row per token."""
        result = {name: x[name] for name in names if name in x}
        return {n: self.numbers(a) if a.ndim == 2 else self.rows(a) for n, a in result.items()}

    def sums(self, array: Array) -> Array:
        """The chunk's numbers of (m, blocks, T), for the program's block."""
        return self._block_spec(array, (None, self.chunk), "block", "chunk")

    def state(self, array: Array, rows: int | None = None, columns: int | None = None) -> Array:
        """The chunk's state of (m, chunks, d, e), or the program's rows or columns of it."""
        block = None, rows or array.shape[2], columns or array.shape[3]
        at = "block" if rows else 0, "block" if columns else 0
        return self._block_spec(array, block, "chunk", *at)

    def state_rows(self, array: Array, rows: int) -> Array:
        """The program's rows of (m, chunks, d)."""
        return self._block_spec(array, (None, rows), "chunk", "block")


class Sweep(NamedTuple):
    """One program for each block of value channels and head, which iterates over all chunks."""

    heads: int
    width: int
    """Value channels of the block"""

    def shape(self, e: int) -> tuple[int, int]:
        return e // self.width, self.heads

    def all_of(self, array: Array) -> Array:
        """The head's part of an array (m, …)."""
        rest = array.shape[1:]
        zeros = (0,) * len(rest)
        return array, pl.BlockSpec((None, *rest), lambda _, h: (h, *zeros))

    def columns(self, array: Array) -> Array:
        """The head's part of an array (m, …), limited to the program's block of the last axis."""
        rest = array.shape[1:-1]
        zeros = (0,) * len(rest)
        return array, pl.BlockSpec((None, *rest, self.width), lambda i, h: (h, *zeros, i))

    def named(self, x: Rows, *names: str) -> Arrays:
        return {name: self.all_of(x[name]) for name in names if name in x}
