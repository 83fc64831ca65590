"""Tiles of queries and keys: which of them meet, and who of them may look at whom.

Query i of t stands at position i + s − t of the keys. It sees the keys that count, of its own
segment, and of those, where causal, none behind it, and with a window w, none w or more away.
Arrays are (b, tokens, heads, channels), filled up to whole tiles with zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from precondattn_pallas.launch import divide
from precondattn_pallas.masks import runs_of


class Sight(NamedTuple):
    """What a call says of who sees whom, before values."""

    t: int
    s: int
    causal: bool
    window: int | None

    @property
    def behind(self) -> int:
        """How far a query sees back."""
        return self.s + self.t if self.window is None else self.window - 1

    @property
    def ahead(self) -> int:
        return 0 if self.causal else self.behind


class Segments(NamedTuple):
    """What a frame hides: keys of another run, and those that do not count, whose run is −1."""

    q_run: Any
    """(b, t), int32"""
    k_run: Any
    """(b, s), int32"""
    key: Any
    """(b, s): the run of a key, or −1"""


def segments_of(sight: Sight, b: int, k_valid: Any, k_segment: Any) -> Segments | None:
    """Of a full call, in which queries are the last of the keys' positions."""
    if k_valid is None and k_segment is None:
        return None
    run = jnp.zeros((b, sight.s), jnp.int32) if k_segment is None else runs_of(k_segment)
    key = run if k_valid is None else jnp.where(k_valid, run, -1)
    return Segments(run[:, sight.s - sight.t :], run, jnp.broadcast_to(key, (b, sight.s)))


def visible(sight: Sight, rows: Any, columns: Any, q_run: Any, k_run: Any) -> Any:
    """May query `row` look at key `column`? Of shapes that broadcast, as the answer."""
    distance = rows + (sight.s - sight.t) - columns
    seen = (distance <= sight.behind) & (distance >= -sight.ahead) & (columns < sight.s)
    return seen if q_run is None else seen & (q_run == k_run)


def met_by_queries(
    sight: Sight, segments: Segments | None, rows: int, columns: int
) -> tuple[Any, Any]:
    """The first tile of keys that a tile of queries meets, and the one behind the last."""
    shift = sight.s - sight.t
    runs = None if segments is None else (segments.q_run, segments.k_run)
    return _met(rows, sight.t, columns, sight.s, shift, sight.behind, sight.ahead, runs)


def met_by_keys(
    sight: Sight, segments: Segments | None, rows: int, columns: int
) -> tuple[Any, Any]:
    """The same of the tiles of queries, `columns` each, that a tile of `rows` keys meets."""
    shift = sight.t - sight.s
    runs = None if segments is None else (segments.k_run, segments.q_run)
    return _met(rows, sight.s, columns, sight.t, shift, sight.ahead, sight.behind, runs)


def _met(
    own_tile: int,
    own: int,
    other_tile: int,
    other: int,
    shift: int,
    behind: int,
    ahead: int,
    runs: tuple[Any, Any] | None,
) -> tuple[Any, Any]:
    """(b or 1, tiles) each. Token i of the own stands where i + shift of the others does."""
    first = jnp.arange(0, own, own_tile, dtype=jnp.int32)
    last = jnp.minimum(first + own_tile, own) - 1
    low = jnp.clip(first + shift - behind, 0, other)[None]
    high = jnp.clip(last + shift + ahead + 1, 0, other)[None]
    if runs is not None:
        mine, others = runs
        find = jax.vmap(jnp.searchsorted, (0, 0))
        low = jnp.maximum(low, find(others, mine[:, first]))
        high = jnp.minimum(high, jax.vmap(_behind)(others, mine[:, last]))
    low, high = low.astype(jnp.int32), high.astype(jnp.int32)
    return divide(low, other_tile), divide(high + (other_tile - 1), other_tile)


def _behind(runs: Any, run: Any) -> Any:
    """The place behind the last token of a run."""
    return jnp.searchsorted(runs, run, side="right")


def filled(array: Any, tokens: int, width: int, axis: int = 1) -> Any:
    """With zeros, to so many tokens and channels."""
    wanted = [(0, 0)] * array.ndim
    wanted[axis] = (0, tokens - array.shape[axis])
    wanted[-1] = (0, width - array.shape[-1])
    return jnp.pad(array, wanted)


def filled_runs(runs: Any, tokens: int, filler: int) -> Any:
    """(b, s), to so many tokens that are of another run."""
    missing = tokens - runs.shape[1]
    return jnp.pad(runs, ((0, 0), (0, missing)), constant_values=filler)
