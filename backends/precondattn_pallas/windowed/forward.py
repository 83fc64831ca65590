"""Attention within windows, forward: o = softmax(S) v over the slots of a window (`slots.py`).

    S_ij = s q_i·k_j + table[entry of i and j]

Grid: tiles of slots of all windows, heads, sequences. A program loops over its window's tiles of
keys, as in flash attention (`softmax/running.py`); a window of at most 64 tokens may be one tile.
Queries, keys and values are read from the user's arrays, without copies in window order. Exponents
and λ are in units of log 2. W² (d + e) products per window and head, where W is padded to whole
tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from precondattn.arrays import Array, Arrays
from precondattn_pallas.configurations import Configuration
from precondattn_pallas.launch import References, divide, launch, loop, remainder, shape_of, whole
from precondattn_pallas.precision import LOG2_E, Products
from precondattn_pallas.softmax.running import Running, empty, mean_and_log, with_tile
from precondattn_pallas.softmax.score_tiles import padded
from precondattn_pallas.windowed.slots import (
    SlotPlaces,
    and_valid,
    load_rows,
    slots,
    store_rows,
)


class WindowedTiling(NamedTuple):
    """Sizes of one launch of a kernel, and its products."""

    places: SlotPlaces
    scale: float
    """s"""
    products: Products
    tile: Configuration
    d: int
    """Key channels, padded, as e is"""
    e: int
    rounds: bool
    """Whether dS is rounded to the dtype of queries and keys before products with them."""

    @property
    def row_tiles(self) -> int:
        return whole(self.places.size.slots, self.tile.rows)

    @property
    def column_tiles(self) -> int:
        return whole(self.places.size.slots, self.tile.columns)

    @property
    def pairs(self) -> int:
        """Pairs of tiles."""
        return self.row_tiles * self.column_tiles

    def tile_of_program(self) -> tuple[Array, Array]:
        """This program's window and tile of slots."""
        program = pl.program_id(0)
        return divide(program, self.row_tiles), remainder(program, self.row_tiles)

    def scores(
        self,
        product: Array,
        table: Array,
        query_slot: Array,
        key_slot: Array,
        mask: Array,
        head: Array = None,
    ) -> Array:
        """Scores of pairs of slots, of their products q k, in units of log 2; −∞ where masked.

        `table` (entries), or (entries, heads) and the index of a head, or None.
        """
        scores = product * (self.scale * LOG2_E)
        if table is not None:
            entry = self.places.entries(query_slot, key_slot)
            at = (entry,) if head is None else (entry, jnp.full_like(entry, head))
            bias = plgpu.load(table.at[at], mask=mask, other=0)
            scores += bias.astype(jnp.float32) * LOG2_E
        return jnp.where(mask, scores, -jnp.inf)

    def keys(self, x: References, window: Array, slot: Array) -> tuple[Array, Array]:
        """The key in each slot of a window, and whether there is one that is valid."""
        key, is_there = self.places.keys(window, slot)
        return key, and_valid(x.get("k_valid"), key, is_there)

    def keys_and_values(self, x: Array, window: Array, slot: Array) -> tuple[Array, Array, Array]:
        """The rows of k and v in these slots, 0 where there is no valid key, and where there is."""
        key, is_key = self.keys(x, window, slot)
        k, v = (load_rows(x[a], key, is_key, w) for a, w in (("k", self.d), ("v", self.e)))
        return k, v, is_key

    def times(self, d_scores: Array, rows: Array) -> Array:
        """dS K, or dSᵀ Q."""
        return self.products.dot_of_gradient(d_scores, rows, rounds=self.rounds)


def forward(x: References, out: References, *, tiling: WindowedTiling) -> None:
    (rows, columns), places = tiling.tile[:2], tiling.places
    window, tile = tiling.tile_of_program()
    row_slot = slots(tile, rows)
    query, is_query = places.queries(window, row_slot)
    is_row = and_valid(x.get("q_valid"), query, is_query)
    q = load_rows(x["q"], query, is_row, tiling.d)

    def add(index: Array, carried: Running) -> Running:
        key_slot = slots(index, columns)
        k, v, is_key = tiling.keys_and_values(x, window, key_slot)
        mask = is_row[:, None] & is_key[None, :]
        product = tiling.products.dot(q, k, right=True)
        scores = tiling.scores(product, x.get("table"), row_slot[:, None], key_slot[None, :], mask)
        return with_tile(carried, scores, v, tiling.products)

    o, logs = mean_and_log(loop(0, tiling.column_tiles, add, empty(rows, tiling.e)))
    store_rows(out["o"], query, is_query, o)
    plgpu.store(out["log_total"].at[query], logs, mask=is_query)


class WindowMasks(NamedTuple):
    """The validity of queries and keys (b or 1, tokens); None where all are valid."""

    q_valid: Array
    k_valid: Array


def attend(tiling: WindowedTiling, x: Arrays, masks: WindowMasks) -> tuple[Array, Array]:
    """o (b, t, h, e) and λ (b, h, t), in float32."""
    (b, t, h, _), e = x["q"].shape, tiling.e
    result = launch(
        forward,
        (tiling.row_tiles * tiling.places.grid.windows, h, b),
        inputs_of(tiling, x, masks),
        {
            "o": (shape_of((b, t, h, e), jnp.float32), rows_of_head(t, e)),
            "log_total": (shape_of((b, h, t), jnp.float32), numbers_of_head(t)),
        },
        tiling.tile,
        interpret=tiling.products.interpret,
        tiling=tiling,
    )
    return result["o"][..., : x["v"].shape[3]], result["log_total"]


def inputs_of(
    tiling: WindowedTiling, x: Arrays, masks: WindowMasks
) -> dict[str, tuple[Array, Array]]:
    """The arrays that every kernel of a query head reads, each with the block of a program."""
    (_, t, h, _), (_, s, n, _) = x["q"].shape, x["v"].shape
    operands = {
        "q": (padded(x["q"], t, tiling.d), rows_of_head(t, tiling.d)),
        "k": (padded(x["k"], s, tiling.d), rows_of_head(s, tiling.d, h // n)),
        "v": (padded(x["v"], s, tiling.e), rows_of_head(s, tiling.e, h // n)),
    }
    return operands | shared_inputs(x, masks)


def shared_inputs(
    x: Arrays, masks: WindowMasks, heads: int | None = None
) -> dict[str, tuple[Array, Array]]:
    """The table of a program's head, or of its `heads`, and which tokens are valid."""
    operands = {}
    if "bias_table" in x:
        table = x["bias_table"]
        operands["table"] = table, pl.BlockSpec((table.shape[0], heads), lambda i, h, b: (0, h))
    for name, valid in masks._asdict().items():
        if valid is not None:
            b = x["q"].shape[0]
            numbers = jnp.broadcast_to(valid, (b, valid.shape[1])).astype(jnp.int32)
            operands[name] = numbers, pl.BlockSpec((None, valid.shape[1]), lambda i, h, b: (b, 0))
    return operands


def rows_of_head(tokens: int, width: int, group: int = 1) -> pl.BlockSpec:
    """The block of (b, tokens, heads, width): one head, which `group` programs read."""
    return pl.BlockSpec((None, tokens, None, width), lambda i, h, b: (b, 0, divide(h, group), 0))


def numbers_of_head(tokens: int) -> pl.BlockSpec:
    """The block of (b, heads, tokens): the numbers of a program's head."""
    return pl.BlockSpec((None, None, tokens), lambda i, h, b: (b, h, 0))
