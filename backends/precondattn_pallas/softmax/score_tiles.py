"""Tiles of queries and keys: which pairs of tiles to visit, and the mask within a tile.

Query i of t is at position i + s − t of the keys. It attends to valid keys of its own segment; with
causality, only up to its own position; with a window w, only at a distance below w. Arrays are
(b, tokens, heads, channels), padded with zeros to whole tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from precondattn.arrays import Array
from precondattn_pallas.arrays import runs_of
from precondattn_pallas.launch import divide


class StaticMask(NamedTuple):
    """The part of the mask that is known before the call runs."""

    t: int
    s: int
    causal: bool
    window: int | None

    @property
    def lookback(self) -> int:
        """How far before its own position a query attends."""
        return self.s + self.t if self.window is None else self.window - 1

    @property
    def lookahead(self) -> int:
        return 0 if self.causal else self.lookback


class SegmentRuns(NamedTuple):
    """Segments and validity of a frame, as indices of runs; invalid keys have run −1."""

    q_run: Array
    """(b, t), int32"""
    k_run: Array
    """(b, s), int32"""
    key: Array
    """(b, s): the run of a key, or −1"""


def segments_of(mask: StaticMask, b: int, k_valid: Array, k_segment: Array) -> SegmentRuns | None:
    """The segments of a full call, in which queries have the last positions of the keys."""
    if k_valid is None and k_segment is None:
        return None
    run = jnp.zeros((b, mask.s), jnp.int32) if k_segment is None else runs_of(k_segment)
    key = run if k_valid is None else jnp.where(k_valid, run, -1)
    return SegmentRuns(run[:, mask.s - mask.t :], run, jnp.broadcast_to(key, (b, mask.s)))


def visible(mask: StaticMask, rows: Array, columns: Array, q_run: Array, k_run: Array) -> Array:
    """Whether query `row` may attend to key `column`; the shapes broadcast."""
    distance = rows + (mask.s - mask.t) - columns
    is_visible = (distance <= mask.lookback) & (distance >= -mask.lookahead) & (columns < mask.s)
    return is_visible if q_run is None else is_visible & (q_run == k_run)


def met_by_queries(
    mask: StaticMask, segments: SegmentRuns | None, rows: int, columns: int
) -> tuple[Array, Array]:
    """The first tile of keys that each tile of queries attends to, and the last plus one."""
    shift = mask.s - mask.t
    runs = None if segments is None else (segments.q_run, segments.k_run)
    return _met(rows, mask.t, columns, mask.s, shift, mask.lookback, mask.lookahead, runs)


def met_by_keys(
    mask: StaticMask, segments: SegmentRuns | None, rows: int, columns: int
) -> tuple[Array, Array]:
    """The first tile of queries that attends to each tile of keys, and the last plus one.

    Tiles have `columns` queries and `rows` keys.
    """
    shift = mask.t - mask.s
    runs = None if segments is None else (segments.k_run, segments.q_run)
    return _met(rows, mask.s, columns, mask.t, shift, mask.lookahead, mask.lookback, runs)


def _met(
    tile: int,
    count: int,
    other_tile: int,
    other: int,
    shift: int,
    lookback: int,
    lookahead: int,
    runs: tuple[Array, Array] | None,
) -> tuple[Array, Array]:
    """The first and the end tile (b or 1, tiles) that each tile meets.

    Token i of a tile has position i + shift among the other tokens.
    """
    first = jnp.arange(0, count, tile, dtype=jnp.int32)
    last = jnp.minimum(first + tile, count) - 1
    low = jnp.clip(first + shift - lookback, 0, other)[None]
    high = jnp.clip(last + shift + lookahead + 1, 0, other)[None]
    if runs is not None:
        mine, others = runs
        find = jax.vmap(jnp.searchsorted, (0, 0))
        low = jnp.maximum(low, find(others, mine[:, first]))
        high = jnp.minimum(high, jax.vmap(_after)(others, mine[:, last]))
    low, high = low.astype(jnp.int32), high.astype(jnp.int32)
    return divide(low, other_tile), divide(high + (other_tile - 1), other_tile)


def _after(runs: Array, run: Array) -> Array:
    """The position after the last token of a run."""
    return jnp.searchsorted(runs, run, side="right")


def padded(array: Array, tokens: int, width: int, axis: int = 1) -> Array:
    """The array padded with zeros to numbers of tokens and channels."""
    wanted = [(0, 0)] * array.ndim
    wanted[axis] = (0, tokens - array.shape[axis])
    wanted[-1] = (0, width - array.shape[-1])
    return jnp.pad(array, wanted)


def padded_runs(runs: Array, tokens: int, filler: int) -> Array:
    """(b, s) padded with tokens of another run."""
    missing = tokens - runs.shape[1]
    return jnp.pad(runs, ((0, 0), (0, missing)), constant_values=filler)
