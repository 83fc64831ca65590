"""Faults of windowed attention: edges and shifts, packed grids, and windows in groups."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from precondattn.arrays import Array, namespace
from precondattn.frame import Frame
from precondattn.spec import windowed
from precondattn.spec.grid_windows import GridWindows
from precondattn_conformance.faults.fault import BACKWARD, FORWARD, Fault, Function, inside
from precondattn_conformance.faults.written_by_hand.written import blocked, written
from precondattn_portable import windowed as blocks
from precondattn_portable.windows import Partition, WindowPart

BOTH = (FORWARD, BACKWARD)
SHIFTED = "windowed[size=3,shift=1,scale=0.3]"
ON_GRID = "windowed[size=2/3,shift=1/2,grid=5,bias=true]"
BIASED = "windowed[bias=true]"


def faults() -> list[Fault]:
    """All faults in this file."""
    return [*_of_windows(), *_of_tables(), *_of_positions(), *_of_blocks()]


def _of_windows() -> list[Fault]:
    return [
        written(mechanism, BOTH, detail, inside(GridWindows, "share", change))
        for mechanism, detail, change in (
            (ON_GRID, "one shift for rows and columns", lambda true: _one_shift(true)),
            (ON_GRID, "tokens at opposite edges in one window", lambda true: _around_edges),
        )
    ]


def _one_shift(true: Function) -> Function:
    return lambda self, *at: true(self._replace(shift=self.shift[:1] * 2), *at)


def _around_edges(self: GridWindows, q_position: Array, k_position: Array) -> Array:
    """A cyclic shift without the mask for parts of the window that wrap around."""
    of_q, of_k = (self.coordinates(position) for position in (q_position, k_position))
    same = q_position[:, :, None] == q_position[:, :, None]
    for x_q, x_k, w, shift in zip(of_q, of_k, self.size, self.shift, strict=True):
        whole = -(-(int(namespace(x_k).max(x_k)) + 1) // w) * w
        i, j = (((x - shift) % whole) // w for x in (x_q, x_k))
        same = same & (i[:, :, None] == j[:, None, :])
    return same


def _of_tables() -> list[Fault]:
    return [
        written(
            BIASED,
            BACKWARD,
            "of the bias, the gradient of the first sequence only",
            inside(windowed, "_sums_by_entry", lambda true: _of_first(true)),
        ),
    ]


def _of_first(true: Function) -> Function:
    return lambda d_scores, entry, entries: true(d_scores[:1, ...], entry[:1, ...], entries)


def _of_positions() -> list[Fault]:
    return [
        written(mechanism, BOTH, detail, inside(windowed, "positions", change))
        for mechanism, detail, change in (
            (SHIFTED, "one grid for all packed sequences", lambda true: _in_one_grid(true)),
            (SHIFTED, "fewer queries as the first tokens", lambda true: _as_first(true)),
        )
    ]


def _in_one_grid(true: Function) -> Function:
    def positions(frame: Frame) -> Array:
        return true(frame.replaced(k_segment=None))

    return positions


def _as_first(true: Function) -> Function:
    def positions(frame: Frame) -> tuple[Array, Array]:
        of_q, of_k = true(frame)
        return of_k[:, : of_q.shape[1]], of_k

    return positions


def _of_blocks() -> list[Fault]:
    return [
        blocked(
            ON_GRID,
            BOTH,
            "slots without a token attended to",
            blocks,
            "partition",
            lambda true: lambda windows, s: _with_every_slot(true(windows, s)),
        ),
        blocked(
            ON_GRID,
            BOTH,
            "the mask of the first windows for all",
            WindowPart,
            "some",
            lambda true: _with_first_mask,
        ),
        blocked(
            ON_GRID,
            BOTH,
            "the masks of windows in another order than the windows",
            blocks.WindowedCall,
            "never_hidden",
            lambda true: _by_window,
        ),
        blocked(
            f"laser({SHIFTED})",
            BACKWARD,
            "queries that the call does not have, with an output of 0",
            blocks.WindowedCall,
            "is_query",
            lambda true: lambda self: None,
            subject="windowed",
        ),
        blocked(
            SHIFTED,
            BOTH,
            "the keys of the first group of windows for the last",
            blocks.WindowedCall,
            "windows",
            lambda true: _with_first_keys(true),
        ),
    ]


def _with_every_slot(partition: Partition) -> Partition:
    def part(each: WindowPart) -> WindowPart:
        if each.hidden is None:
            return each
        is_token = ~np.diagonal(each.hidden, axis1=1, axis2=2)
        return each._replace(hidden=each.hidden & is_token[:, None, :])

    return partition._replace(parts=tuple(map(part, partition.parts)))


def _with_first_mask(self: WindowPart, start: int, stop: int) -> WindowPart:
    tokens = self.tokens[start:stop]
    hidden = None if self.hidden is None else self.hidden[: len(tokens)]
    return WindowPart(tokens, hidden)


def _by_window(self: blocks.WindowedCall, part: WindowPart) -> Array | None:
    if part.hidden is None:
        return None
    return self.index(np.repeat(~part.hidden, self.x["q"].shape[0], axis=0)[:, None])


def _with_first_keys(true: Function) -> Function:
    def windows(self: blocks.WindowedCall, together: int) -> Iterator[blocks.GatheredWindows]:
        groups = list(true(self, together))
        *before, last = groups
        if last.k.shape == groups[0].k.shape:
            last = last._replace(k=groups[0].k, v=groups[0].v)
        yield from (*before, last)

    return windows
