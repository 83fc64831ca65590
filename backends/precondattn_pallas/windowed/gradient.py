"""Attention within windows, backward, from λ, D = rowsum(do ∘ o) and do:

    A = e^{S − λ},    dS = A ∘ (do vᵀ − D),    dq = s dS k,    dk = s dSᵀ q,    dv = Aᵀ do,
    dtable[m] = Σ dS_ij over the pairs of slots with entry m, of all windows and sequences.

Kernels, and their grids:

    query gradient    dq                 tiles of slots of all windows, heads, sequences
    key gradient      dk, dv             the same, per key/value head; it loops over the query heads
    table gradient    Σ_windows dS_ij    pairs of tiles, heads, groups of windows of all sequences

The last one has the sum of its pairs in registers, and writes it once: (groups, h, W, W) numbers,
which XLA sums over groups and then by entry. No two programs add to the same element, so the result
is deterministic.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from precondattn.arrays import Array, Arrays
from precondattn.kernel_backend.windows import TOGETHER
from precondattn.spec.grid_windows import sum_by_entry
from precondattn_pallas.launch import References, divide, launch, loop, remainder, shape_of, whole
from precondattn_pallas.softmax.score_tiles import padded
from precondattn_pallas.windowed.forward import (
    WindowedTiling,
    WindowMasks,
    inputs_of,
    numbers_of_head,
    rows_of_head,
    shared_inputs,
)
from precondattn_pallas.windowed.slots import (
    and_valid,
    load_numbers,
    load_rows,
    slots,
    store_rows,
)

CHANNELS = 32
"""Channels of a product of the table's gradient."""


class WeightedRows(NamedTuple):
    """The queries in the slots of a tile, with their λ and D."""

    query: Array
    is_row: Array
    logs: Array
    """λ, 0 where there is no such query."""
    d_sum: Array
    """D"""

    @classmethod
    def of_slots(
        cls,
        tiling: WindowedTiling,
        x: References,
        window: Array,
        slot: Array,
        head: Array | None = None,
    ) -> WeightedRows:
        """The queries in slots of a window; x has the numbers of one head, or of several heads."""
        query, is_row = tiling.places.queries(window, slot)
        is_row = and_valid(x.get("q_valid"), query, is_row)
        logs = load_numbers(x["log_total"], query, is_row, jnp.inf, head)
        is_row = is_row & (logs < jnp.inf)
        d_sum = load_numbers(x["d_sum"], query, is_row, 0.0, head)
        return cls(query, is_row, jnp.where(is_row, logs, 0.0), d_sum)

    def load(self, array: Array, width: int, head: Array | None = None) -> Array:
        """The rows of q or do in these slots, 0 where there is no query."""
        return load_rows(array, self.query, self.is_row, width, head)


def query_gradient(x: References, out: References, *, tiling: WindowedTiling) -> None:
    """A tile of dq / s."""
    rows, columns = tiling.tile[:2]
    window, tile = tiling.tile_of_program()
    row_slot = slots(tile, rows)
    queries = WeightedRows.of_slots(tiling, x, window, row_slot)
    q, d_o = queries.load(x["q"], tiling.d), queries.load(x["d_o"], tiling.e)

    def add(index: Array, acc: Array) -> Array:
        key_slot = slots(index, columns)
        k, v, is_key = tiling.keys_and_values(x, window, key_slot)
        mask = queries.is_row[:, None] & is_key[None, :]
        product = tiling.products.dot(q, k, right=True)
        scores = tiling.scores(product, x.get("table"), row_slot[:, None], key_slot[None, :], mask)
        a = jnp.exp2(scores - queries.logs[:, None])
        d_a = tiling.products.dot(d_o, v, right=True)
        return acc + tiling.times(a * (d_a - queries.d_sum[:, None]), k)

    d_q = loop(0, tiling.column_tiles, add, jnp.zeros((rows, tiling.d), jnp.float32))
    store_rows(out["d_q"], *tiling.places.queries(window, row_slot), d_q)


def key_gradient(x: References, out: References, *, tiling: WindowedTiling, group: int) -> None:
    """A tile of dk / s and dv, from `group` query heads; tiles are keys × queries."""
    rows, columns = tiling.tile[:2]
    window, tile = tiling.tile_of_program()
    key_slot = slots(tile, rows)
    k, v, is_key = tiling.keys_and_values(x, window, key_slot)

    def of_head(head: Array, carried: Array) -> Array:
        def add(index: Array, carried: tuple[Array, Array]) -> tuple[Array, Array]:
            d_k, d_v = carried
            query_slot = slots(index, columns)
            queries = WeightedRows.of_slots(tiling, x, window, query_slot, head)
            q, d_o = queries.load(x["q"], tiling.d, head), queries.load(x["d_o"], tiling.e, head)
            mask = queries.is_row[None, :] & is_key[:, None]
            product = tiling.products.dot(k, q, right=True)
            scores = tiling.scores(
                product, x.get("table"), query_slot[None, :], key_slot[:, None], mask, head
            )
            a = jnp.exp2(scores - queries.logs[None, :])
            d_v += tiling.products.dot(a.astype(d_o.dtype), d_o)
            d_a = tiling.products.dot(v, d_o, right=True)
            return d_k + tiling.times(a * (d_a - queries.d_sum[None, :]), q), d_v

        return loop(0, tiling.column_tiles, add, carried)

    start = tuple(jnp.zeros((rows, width), jnp.float32) for width in (tiling.d, tiling.e))
    d_k, d_v = loop(0, group, of_head, start)
    key, is_there = tiling.places.keys(window, key_slot)
    store_rows(out["d_k"], key, is_there, d_k)
    store_rows(out["d_v"], key, is_there, d_v)


def table_gradient(x: References, out: References, *, tiling: WindowedTiling) -> None:
    """The sum of dS over a group of windows of one sequence, for a pair of tiles of slots."""
    (rows, columns), places = tiling.tile[:2], tiling.places
    group, tile = divide(pl.program_id(0), tiling.pairs), remainder(pl.program_id(0), tiling.pairs)
    row_slot = slots(divide(tile, tiling.column_tiles), rows)
    key_slot = slots(remainder(tile, tiling.column_tiles), columns)

    def add(window: Array, acc: Array) -> Array:
        queries = WeightedRows.of_slots(tiling, x, window, row_slot)
        keys = tiling.keys(x, window, key_slot)
        mask = queries.is_row[:, None] & keys[1][None, :]
        product = _product(tiling, x["q"], queries[:2], x["k"], keys, tiling.d)
        scores = tiling.scores(product, x["table"], row_slot[:, None], key_slot[None, :], mask)
        d_a = _product(tiling, x["d_o"], queries[:2], x["v"], keys, tiling.e)
        return acc + jnp.exp2(scores - queries.logs[:, None]) * (d_a - queries.d_sum[:, None])

    last = jnp.minimum((group + 1) * TOGETHER, places.grid.windows)
    acc = loop(group * TOGETHER, last, add, jnp.zeros((rows, columns), jnp.float32))
    row = lax.broadcast_in_dim(row_slot, acc.shape, (0,))
    column = lax.broadcast_in_dim(key_slot, acc.shape, (1,))
    inside = (row < places.size.slots) & (column < places.size.slots)
    plgpu.store(out["d_pairs"].at[row, column], acc, mask=inside)


def _product(
    tiling: WindowedTiling,
    left: Array,
    rows: tuple[Array, Array],
    right: Array,
    columns: tuple[Array, Array],
    width: int,
) -> Array:
    """x yᵀ of rows x and y, some channels at a time; both are loaded again for each window."""
    each = min(width, CHANNELS)

    def add(i: Array, total: Array) -> Array:
        x, y = (
            load_rows(array, *of, each, first=i * each)
            for array, of in ((left, rows), (right, columns))
        )
        return total + tiling.products.dot(x, y, right=True)

    return loop(0, width // each, add, jnp.zeros(tiling.tile[:2], jnp.float32))


def d_queries(tiling: WindowedTiling, x: Arrays, masks: WindowMasks) -> Array:
    """dq / s (b, t, h, d), in float32."""
    b, t, h, d = x["q"].shape
    result = launch(
        query_gradient,
        (tiling.row_tiles * tiling.places.grid.windows, h, b),
        _inputs(tiling, x, masks),
        {"d_q": (shape_of((b, t, h, tiling.d), jnp.float32), rows_of_head(t, tiling.d))},
        tiling.tile,
        interpret=tiling.products.interpret,
        tiling=tiling,
    )
    return result["d_q"][..., :d]


def d_keys_and_values(tiling: WindowedTiling, x: Arrays, masks: WindowMasks) -> tuple[Array, Array]:
    """dk / s (b, s, n, d) and dv (b, s, n, e), in float32."""
    (b, t, h, d), (_, s, n, e) = x["q"].shape, x["v"].shape
    group = h // n

    def rows_of_group(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, t, group, width), lambda i, n, b: (b, 0, n, 0))

    numbers_of_group = pl.BlockSpec((None, group, t), lambda i, n, b: (b, n, 0))
    inputs = shared_inputs(x, masks, group) | {
        "q": (padded(x["q"], t, tiling.d), rows_of_group(tiling.d)),
        "d_o": (padded(x["d_o"], t, tiling.e), rows_of_group(tiling.e)),
        "k": (padded(x["k"], s, tiling.d), rows_of_head(s, tiling.d)),
        "v": (padded(x["v"], s, tiling.e), rows_of_head(s, tiling.e)),
        "log_total": (x["log_total"], numbers_of_group),
        "d_sum": (x["d_sum"], numbers_of_group),
    }
    widths = {"d_k": tiling.d, "d_v": tiling.e}
    result = launch(
        key_gradient,
        (tiling.row_tiles * tiling.places.grid.windows, n, b),
        inputs,
        {
            name: (shape_of((b, s, n, width), jnp.float32), rows_of_head(s, width))
            for name, width in widths.items()
        },
        tiling.tile,
        interpret=tiling.products.interpret,
        tiling=tiling,
        group=group,
    )
    return result["d_k"][..., :d], result["d_v"][..., :e]


def d_table(tiling: WindowedTiling, x: Arrays, masks: WindowMasks) -> Array:
    """The gradient of the table (entries, h), in float32."""
    (b, _, h, _), size = x["q"].shape, tiling.places.size
    groups, slots = whole(tiling.places.grid.windows, TOGETHER), size.slots
    block = pl.BlockSpec(
        (None, None, None, slots, slots),
        lambda i, h, b: (b, divide(i, tiling.pairs), h, 0, 0),
    )
    result = launch(
        table_gradient,
        (groups * tiling.pairs, h, b),
        _inputs(tiling, x, masks),
        {"d_pairs": (shape_of((b, groups, h, slots, slots), jnp.float32), block)},
        tiling.tile,
        interpret=tiling.products.interpret,
        tiling=tiling,
    )
    return sum_by_entry(jnp.sum(result["d_pairs"], axis=(0, 1)), size.axes)


def _inputs(
    tiling: WindowedTiling, x: Arrays, masks: WindowMasks
) -> dict[str, tuple[Array, Array]]:
    """The arrays that the gradients of a query head read."""
    t = x["q"].shape[1]
    return inputs_of(tiling, x, masks) | {
        "d_o": (padded(x["d_o"], t, tiling.e), rows_of_head(t, tiling.e)),
        "log_total": (x["log_total"], numbers_of_head(t)),
        "d_sum": (x["d_sum"], numbers_of_head(t)),
    }
