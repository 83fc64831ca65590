"""A recurrence's arrays as the kernels have them, and the part of each that a program sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from precondattn.spec.recurrence import Stream
from precondattn_pallas.configurations import configuration
from precondattn_pallas.launch import divide, launch, remainder, shape_of, whole
from precondattn_pallas.precision import Products, padded_width
from precondattn_pallas.recurrence.gate_sums import factors_of

LOWEST = -200.0
"""A gate of which float32's exponential is 0, as of −∞."""

WIDEST_BLOCK = 64
"""Value channels come in blocks of so many, or fewer."""

Rows = Mapping[str, Any]
"""Arrays of a recurrence by name, those that it has (`chunk_tiles.py`): q (m, r, T, d), k, v; beta
(m, T); g, reading, writing (m, T), or (m, T, d) where each key channel has its own; total
(m, chunks, 1 or d)."""


class Plan(NamedTuple):
    """How the tokens of a call are cut."""

    products: Products
    chunk: int
    width: int
    """What configurations go by."""

    @property
    def half(self) -> bool:
        """Whether products are of 16 bits or tf32."""
        return self.products.tf32

    def block(self, kernel: str, width: int) -> int:
        """Channels that a kernel has at once, of so many."""
        return min(configuration(kernel, self.width, self.half).columns, width)

    def launch(
        self,
        kernel: Callable[..., None],
        name: str,
        shape: tuple[int, ...],
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        **constants: Any,
    ) -> dict[str, Any]:
        """By the configuration of that name."""
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


def plan_of(products: Products, d: int, e: int, states: str = "chunk_states") -> Plan:
    """Of states of d x e that the kernel `states` carries on."""
    width = max(padded_width(d), min(padded_width(e), 2 * WIDEST_BLOCK))
    return Plan(products, configuration(states, width, products.tf32).rows, width)


def rows_of(x: Stream, plan: Plan, dtype: Any, *, decays: bool) -> dict[str, Any]:
    """Of a stream with at most one gate for each token; q, k and v in a dtype."""
    found = written_of(x.k, x.v, x.g if decays else None, x.beta, plan, dtype)
    tokens, width = found["k"].shape[1:]
    return {"q": queries_of(x.q, x.k.shape[2], tokens, width).astype(dtype), **found}


def written_of(k: Any, v: Any, g: Any, beta: Any, plan: Plan, dtype: Any) -> dict[str, Any]:
    """All but q; gates (b, m, s, 1 or d, 1), and β, where there are any."""
    b, m, s, d = k.shape
    tokens, width = whole(s, plan.chunk) * plan.chunk, padded_width(d)

    def filled(array: Any, *widths: int) -> Any:
        """(b m, T, widths), with zeros behind the last token."""
        array = array.reshape(b * m, *array.shape[2:])
        sizes = zip((tokens, *widths), array.shape[1:], strict=True)
        return jnp.pad(array, ((0, 0), *((0, size - has) for size, has in sizes)))

    found = {
        "k": filled(k.astype(dtype), width),
        "v": filled(v.astype(dtype), padded_values(v.shape[3])),
    }
    if beta is not None:
        found["beta"] = filled(beta.astype(jnp.float32))
    if g is not None:
        g = jnp.maximum(g[..., 0].astype(jnp.float32), LOWEST)
        found["g"] = filled(g, width) if g.shape[3] > 1 else filled(g[..., 0])
        found |= factors_of(found["g"], plan.chunk)
    return found


def padded_values(e: int) -> int:
    """The width of values in whole blocks."""
    block = min(padded_width(e), WIDEST_BLOCK)
    return whole(e, block) * block


def queries_of(q: Any, s: int, tokens: int, width: int) -> Any:
    """Queries of the last t of s tokens (b, m, t, r, d) as (b m, r, T, width), else zeros."""
    b, m, t, r, d = q.shape
    q = jnp.swapaxes(q.reshape(b * m, t, r, d), 1, 2)
    return jnp.pad(q, ((0, 0), (0, 0), (s - t, tokens - s), (0, width - d)))


def padded_state(state: Any) -> Any:
    """(b, m, d, e) as (b m, d, e), whole tiles of float32."""
    b, m, d, e = state.shape
    state = state.astype(jnp.float32).reshape(b * m, d, e)
    return jnp.pad(state, ((0, 0), (0, padded_width(d) - d), (0, padded_values(e) - e)))


def unfilled_queries(rows: Any, x: Stream, width: int) -> Any:
    """(b m, r, T, w) as (b, m, t, r, width): those of the last t tokens."""
    b, m, t, r, _ = x.q.shape
    s = x.k.shape[2]
    rows = jnp.swapaxes(rows[:, :, s - t : s, :width], 1, 2)
    return rows.reshape(b, m, t, r, width)


def unfilled_state(state: Any, like: Any) -> Any:
    """(b m, d, e), filled up, as it is outside."""
    return state[:, : like.shape[2], : like.shape[3]].reshape(like.shape)


def each_query(array: Any) -> Any:
    """(m, r, …) as (m r, …): every query of a state as if it were a head."""
    return array.reshape(-1, *array.shape[2:])


def empty(*shape: int) -> jax.ShapeDtypeStruct:
    return shape_of(shape, jnp.float32)


class Grid(NamedTuple):
    """A program for each chunk, block of columns and head: (chunks × blocks, heads)."""

    chunk: int
    count: int
    """Of chunks."""
    heads: int
    """All queries of a state count, where each has a program."""
    blocks: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.count * self.blocks, self.heads

    def _place(self, array: Any, block: tuple[int | None, ...], *at: Any, together: int = 1) -> Any:
        """A block of an array of all heads, `at` numbers, the "chunk" or the "block"; blocks are
        of one chunk, or of some together."""
        by = self.heads // array.shape[0]

        def index(g: Any, h: Any) -> Any:
            chunk, own = divide(g, self.blocks * together), remainder(g, self.blocks)
            places = {"chunk": chunk, "block": own}
            return divide(h, by), *(places.get(place, place) for place in at)

        return array, pl.BlockSpec((None, *block), index)

    def rows(self, array: Any, width: int | None = None) -> Any:
        """The chunk's rows of (m, T, w), or the program's own columns of them."""
        block = self.chunk, width or array.shape[2]
        return self._place(array, block, "chunk", "block" if width else 0)

    def around(self, array: Any, chunks: int, width: int | None = None) -> Any:
        """Those of so many chunks together, the program's own among them."""
        rows = chunks * array.shape[1] // self.count
        block, at = (rows, width or array.shape[2]), "block" if width else 0
        return self._place(array, block, "chunk", at, together=chunks)

    def group(self, array: Any, width: int | None = None) -> Any:
        """The same of (m, r, T, w)."""
        block = array.shape[1], self.chunk, width or array.shape[3]
        return self._place(array, block, 0, "chunk", "block" if width else 0)

    def numbers(self, array: Any) -> Any:
        """One for each token of the chunk, of (m, T)."""
        return self._place(array, (self.chunk,), "chunk")

    def those(self, x: Rows, *names: str) -> dict[str, Any]:
        """The same of arrays by name, those that there are; or one for each of its channels."""
        found = {name: x[name] for name in names if name in x}
        return {n: self.numbers(a) if a.ndim == 2 else self.rows(a) for n, a in found.items()}

    def sums(self, array: Any) -> Any:
        """The same of (m, blocks, T), of the program's own block."""
        return self._place(array, (None, self.chunk), "block", "chunk")

    def state(self, array: Any, rows: int | None = None, columns: int | None = None) -> Any:
        """The chunk's own of (m, chunks, d, e), or the program's own rows or columns of it."""
        block = None, rows or array.shape[2], columns or array.shape[3]
        at = "block" if rows else 0, "block" if columns else 0
        return self._place(array, block, "chunk", *at)

    def state_rows(self, array: Any, rows: int) -> Any:
        """The program's own of (m, chunks, d)."""
        return self._place(array, (None, rows), "chunk", "block")


class Way(NamedTuple):
    """A program for each block of value channels and head, which goes over all chunks."""

    heads: int
    width: int
    """Of the block."""

    def shape(self, e: int) -> tuple[int, int]:
        return e // self.width, self.heads

    def all_of(self, array: Any) -> Any:
        """Of an array (m, …), all of the head."""
        rest = array.shape[1:]
        zeros = (0,) * len(rest)
        return array, pl.BlockSpec((None, *rest), lambda _, h: (h, *zeros))

    def columns(self, array: Any) -> Any:
        """The same, of its last axis the program's own block."""
        rest = array.shape[1:-1]
        zeros = (0,) * len(rest)
        return array, pl.BlockSpec((None, *rest, self.width), lambda i, h: (h, *zeros, i))

    def those(self, x: Rows, *names: str) -> dict[str, Any]:
        return {name: self.all_of(x[name]) for name in names if name in x}
